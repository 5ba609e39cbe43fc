// What tensors over arena memory have in common, whatever device they are on.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <map>
#include <stdexcept>
#include <string>
#include <utility>

namespace tide {

namespace nb = nanobind;

inline nb::dlpack::dtype dtype_from_name(const std::string& name) {
  using Code = nb::dlpack::dtype_code;
  static const std::map<std::string, std::pair<Code, uint8_t>> known = {
      {"float64", {Code::Float, 64}}, {"float32", {Code::Float, 32}}, {"float16", {Code::Float, 16}},
      {"bfloat16", {Code::Bfloat, 16}}, {"int64", {Code::Int, 64}}, {"int32", {Code::Int, 32}},
      {"int16", {Code::Int, 16}}, {"int8", {Code::Int, 8}}, {"uint8", {Code::UInt, 8}},
      {"uint16", {Code::UInt, 16}}, {"uint32", {Code::UInt, 32}}, {"uint64", {Code::UInt, 64}},
      {"bool", {Code::Bool, 8}}, {"complex64", {Code::Complex, 64}}, {"complex128", {Code::Complex, 128}}};
  const auto it = known.find(name);
  if (it == known.end()) {
    std::string allowed;
    for (const auto& entry : known) allowed += (allowed.empty() ? "" : ", ") + entry.first;
    throw std::invalid_argument("no dtype \"" + name + "\"; allowed: " + allowed);
  }
  nb::dlpack::dtype dtype;
  dtype.code = static_cast<uint8_t>(it->second.first);
  dtype.bits = it->second.second;
  dtype.lanes = 1;
  return dtype;
}

// Throws unless `numel` elements from `byte_offset` are aligned and lie within `available` bytes.
inline void check_within(int64_t byte_offset, int64_t numel, nb::dlpack::dtype dtype, const std::string& name,
                         uint64_t available) {
  const int64_t item = dtype.bits / 8, bytes = static_cast<int64_t>(available);
  if (byte_offset < 0 || numel < 0 || byte_offset > bytes || numel > (bytes - byte_offset) / item)
    throw std::invalid_argument("byte_offset " + std::to_string(byte_offset) + " and " + std::to_string(numel) +
                                " elements of " + name + " do not lie within the " + std::to_string(bytes) + " bytes");
  if (byte_offset % item != 0)
    throw std::invalid_argument("byte_offset " + std::to_string(byte_offset) + " is not a multiple of the " +
                                std::to_string(item) + " bytes of " + name);
}

}  // namespace tide
