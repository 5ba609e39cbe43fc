// Decoding and checking. Replay is in replay.cpp.
#include "program.h"

#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>

namespace tide {
namespace {

constexpr int64_t kMaxBytes = int64_t{1} << 62;

[[noreturn]] void bad_word(size_t op, int word, int64_t value, const std::string& allowed) {
  throw std::invalid_argument("op " + std::to_string(op) + ", word " + std::to_string(word) + " is " +
                              std::to_string(value) + "; allowed: " + allowed);
}

// Checks words of one op against ranges.
class Words {
 public:
  Words(size_t index, const Op& op) : index_(index), op_(op) {}
  int64_t operator[](int word) const { return op_[static_cast<size_t>(word)]; }

  void between(int word, int64_t low, int64_t high, const char* what) const {
    const int64_t value = (*this)[word];
    if (value < low || value > high)
      bad_word(index_, word, value, std::string(what) + " from " + std::to_string(low) + " to " + std::to_string(high));
  }
  void base(int word, size_t n) const { between(word, 0, static_cast<int64_t>(n) - 1, "a base"); }
  void counter(int word, size_t n) const { between(word, 0, static_cast<int64_t>(n) - 1, "a counter"); }
  void size(int word, const char* what) const { between(word, 0, kMaxBytes, what); }

  // offset + (rows - 1) * pitch + elements * item must be an address distance.
  void extent(int word, int64_t offset, int64_t rows, int64_t elements, int64_t pitch, int64_t item) const {
    int64_t row_bytes = 0, skipped = 0, end = 0;
    if (rows == 0 || elements == 0) return;
    if (__builtin_mul_overflow(elements, item, &row_bytes) || __builtin_mul_overflow(rows - 1, pitch, &skipped) ||
        __builtin_add_overflow(offset, row_bytes, &end) || __builtin_add_overflow(end, skipped, &end) ||
        end > kMaxBytes)
      bad_word(index_, word, (*this)[word], "a size for which the operand ends below 2**62 bytes");
  }

 private:
  size_t index_;
  const Op& op_;
};

template <class T>
std::vector<T> decode(std::string_view bytes, const char* name) {
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "programs are little-endian");
  if (bytes.size() % sizeof(T) != 0)
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(bytes.size()) +
                                " bytes; allowed: a multiple of " + std::to_string(sizeof(T)));
  std::vector<T> items(bytes.size() / sizeof(T));
  if (!bytes.empty()) std::memcpy(static_cast<void*>(items.data()), bytes.data(), bytes.size());
  return items;
}

size_t checked_count(const char* name, int64_t value, int64_t limit) {
  if (value < 0 || value > limit)
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + "; allowed: 0 to " +
                                std::to_string(limit));
  return static_cast<size_t>(value);
}

void check_copy(const Words& w, size_t n_bases) {
  w.base(1, n_bases);
  w.size(2, "a byte offset");
  w.base(3, n_bases);
  w.size(4, "a byte offset");
  w.size(5, "a number of rows");
  w.size(6, "a number of elements");
  w.size(7, "a pitch in bytes");
  w.size(8, "a pitch in bytes");
  w.between(9, kFp32, kRaw, "a dtype");
  w.between(10, kFp32, kRaw, "a dtype");
  if (w[9] != w[10] && (w[9] == kRaw || w[10] == kRaw)) w.between(10, w[9], w[9], "for raw bytes the same dtype,");
  w.extent(7, w[2], w[5], w[6], w[7], dtype_bytes(w[9]));
  w.extent(8, w[4], w[5], w[6], w[8], dtype_bytes(w[10]));
}

}  // namespace

Program::Program(const Parts& parts)
    : ops_(decode<Op>(parts.ops, "ops")), sources_(decode<Source>(parts.sources, "sources")),
      n_bases_(checked_count("n_bases", parts.n_bases, int64_t{1} << 32)),
      n_counters_(checked_count("n_counters", parts.n_counters, kMaxCounters)) {
  for (size_t i = 0; i < sources_.size(); ++i) {
    const Source& s = sources_[i];
    if (s.base < 0 || s.base >= static_cast<int64_t>(n_bases_) || s.offset < 0 || s.offset > kMaxBytes)
      throw std::invalid_argument("source " + std::to_string(i) + " is base " + std::to_string(s.base) + ", offset " +
                                  std::to_string(s.offset) + "; allowed: bases below " + std::to_string(n_bases_) +
                                  ", offsets from 0");
  }
  for (size_t i = 0; i < ops_.size(); ++i) check_op(i);
  for (size_t i = 0; i < parts.streams.size(); ++i) {
    const auto [first, count] = parts.streams[i];
    const auto n = static_cast<int64_t>(ops_.size());
    if (first < 0 || count < 0 || first > n || count > n - first)
      throw std::invalid_argument("stream " + std::to_string(i) + " is ops " + std::to_string(first) + " + " +
                                  std::to_string(count) + "; there are " + std::to_string(n));
    streams_.push_back({static_cast<size_t>(first), static_cast<size_t>(count)});
  }
  for (size_t i = 0; i < parts.advance.size(); ++i) {
    const auto& [counter, writer, amount] = parts.advance[i];
    if (counter < 0 || counter >= static_cast<int64_t>(n_counters_) || writer < 0 || writer >= kMaxRanks ||
        amount < 0 || amount > INT32_MAX)
      throw std::invalid_argument("advance " + std::to_string(i) + " is counter " + std::to_string(counter) +
                                  ", writer " + std::to_string(writer) + ", amount " + std::to_string(amount) +
                                  "; allowed: counters below " + std::to_string(n_counters_) + ", writers below " +
                                  std::to_string(kMaxRanks) + ", amounts from 0 to 2**31 - 1");
    advance_.push_back({static_cast<uint32_t>(counter), static_cast<uint32_t>(writer), static_cast<uint32_t>(amount)});
    highest_writer_ = std::max(highest_writer_, writer);
  }
  index_awaits();
}

void Program::check_op(size_t index) {
  const Words w(index, ops_[index]);
  switch (w[0]) {
    case kCopy:
      check_copy(w, n_bases_);
      return;
    case kSum: {
      w.base(1, n_bases_);
      w.size(2, "a byte offset");
      w.size(3, "a number of elements");
      w.between(4, kFp32, kBf16, "a dtype");
      w.between(5, kFp32, kBf16, "a dtype");
      const auto n = static_cast<int64_t>(sources_.size());
      w.between(6, 1, n, "a number of sources");
      w.between(7, 0, n - w[6], "a first source");
      w.between(8, 0, kAccumulate | kScaled, "flags");
      w.extent(3, w[2], 1, w[3], 0, dtype_bytes(w[5]));
      for (int64_t k = w[7]; k < w[7] + w[6]; ++k)
        w.extent(3, sources_[static_cast<size_t>(k)].offset, 1, w[3], 0, dtype_bytes(w[4]));
      return;
    }
    case kZero:
      w.base(1, n_bases_);
      w.size(2, "a byte offset");
      w.size(3, "a number of bytes");
      w.extent(3, w[2], 1, w[3], 0, 1);
      return;
    case kNotify:
      w.counter(1, n_counters_);
      w.between(2, 0, INT32_MAX, "an amount");
      if (w[3] == -1) bad_word(index, 3, w[3], "a reader rank, or -2 for all other ranks");
      w.between(3, kEveryOther, int64_t{kMaxRanks} - 1, "a reader rank, or -2 for all other ranks,");
      return;
    case kAwait:
      w.counter(1, n_counters_);
      w.between(2, 0, int64_t{kMaxRanks} - 1, "a writer rank");
      w.between(3, INT32_MIN, INT32_MAX, "a count");
      highest_writer_ = std::max(highest_writer_, w[2]);
      return;
    default:
      bad_word(index, 0, w[0], "an opcode from 0 to 4");
  }
}

void Program::index_awaits() {
  std::map<std::pair<int64_t, int64_t>, uint32_t> known;
  await_slot_of_.assign(ops_.size(), 0);
  for (size_t i = 0; i < ops_.size(); ++i) {
    const Op& op = ops_[i];
    if (op[0] != kAwait) continue;
    const auto [it, fresh] = known.try_emplace({op[1], op[2]}, static_cast<uint32_t>(await_slots_.size()));
    if (fresh) await_slots_.push_back({static_cast<uint32_t>(op[1]), static_cast<uint32_t>(op[2])});
    await_slot_of_[i] = it->second;
  }
}

}  // namespace tide
