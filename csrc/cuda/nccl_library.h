// The NCCL that is in this process already: found, never loaded.
//
// A second copy beside torch's would bind some of its internal calls to the first one; and one that came with torch is
// what the program's own collectives use.
#pragma once

#include <stdexcept>
#include <string>

#include "nccl_types.h"

namespace tide::nccl {

// What NCCL refused (Python: RuntimeError). Waits that took too long are OsError with ETIMEDOUT.
struct NcclError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Probe {
  bool available = false;  // windows and host RMA can be asked for
  std::string reason;      // why not
  int version = 0;         // as ncclGetVersion gives it; 0 if there is no library
  std::string path;
};

// Looks anew each time until it has been found: torch may be imported later. Never throws.
Probe probe();

// The entry points; throws NcclError with probe()'s reason where there are none.
const Api& api();

// "2.31.2" for 23102.
std::string version_words(int version);

// Throws NcclError unless `result` is success. `comm` may be null.
void check(Result result, const char* call, CommHandle comm = nullptr);
std::string describe(Result result, CommHandle comm);

}  // namespace tide::nccl
