"""One rank that runs the Python snippets of the pages, each page in names of its own (started by run_snippets.py).

    python snippet_ranks.py PIECES.json RESULT.json

PIECES.json is a list of pages, each with its ``folder`` and its ``pieces`` (a name for tracebacks, source). RESULT.json
says where the package came from, which pieces ran, and the traceback of the one that did not.
"""

import json
import linecache
import os
import sys
import traceback


def run(pages, result):
    """Run all pieces in order, until one fails: the other ranks would wait for it."""
    for page in pages:
        os.chdir(page["folder"])
        sys.path.insert(0, page["folder"])
        names = {"__name__": "__main__"}
        for name, source in page["pieces"]:
            linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
            exec(compile(source, name, "exec"), names)
            result["ran"].append(name)
        sys.path.remove(page["folder"])
        for module in [m for m in sys.modules if m.split(".")[0] == "my_project"]:
            del sys.modules[module]


def main():
    """Read, run, write, and leave without torch's occasional abort at exit."""
    import torch
    import torch.distributed as dist

    import tide_strategies
    from tide_strategies.runtime.teardown import orderly_teardown

    pieces, report = sys.argv[1:]  # read at once: a snippet may change them
    with open(pieces, encoding="utf-8") as f:
        pages = json.load(f)
    result = {"package": tide_strategies.__file__, "ran": [], "error": ""}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        run(pages, result)
    except Exception:
        result["error"] = traceback.format_exc()
    with open(report, "w", encoding="utf-8") as f:
        json.dump(result, f)
    if result["error"]:
        os._exit(1)  # without waiting for ranks that wait for this one
    orderly_teardown()


if __name__ == "__main__":
    main()
