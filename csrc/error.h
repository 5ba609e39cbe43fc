// Errors of the native core. Bad arguments are std::invalid_argument (Python: ValueError); what the
// operating system refused is OsError (Python: OSError with its errno).
#pragma once

#include <stdexcept>
#include <string>

namespace tide {

struct OsError : std::runtime_error {
  OsError(int errno_value, const std::string& what) : std::runtime_error(what), code(errno_value) {}
  int code;
};

// "<what>: <strerror(errno_value)>"
[[noreturn]] void throw_os(int errno_value, const std::string& what);

}  // namespace tide
