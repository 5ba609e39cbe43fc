"""Print the tables of docs/simulator.md: predictions beside the paper's measurements."""

from tide_strategies.planner.predict import paper_comparison

print("| what | nodes | MiB | measured | predicted | error |")
print("| --- | --- | --- | --- | --- | --- |")
for row in paper_comparison():
    unit = [row.what, str(row.nodes), str(row.mib), f"{row.measured:g}", f"{row.predicted:.2f}", f"{row.error:+.1%}"]
    print(f"| {' | '.join(unit)} |")
