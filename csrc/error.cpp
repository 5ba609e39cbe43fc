#include "error.h"

#include <system_error>

namespace tide {

void throw_os(int errno_value, const std::string& what) {
  throw OsError(errno_value, what + ": " + std::generic_category().message(errno_value));
}

}  // namespace tide
