#include "nccl_library.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <vector>

namespace tide::nccl {
namespace {

struct Library {
  std::mutex lock;
  std::atomic<bool> found{false};
  Probe about;
  Api entry;
};

Library& library() {
  static Library* const it = new Library;  // never destroyed: communicators may outlive static destructors
  return *it;
}

int add_if_nccl(dl_phdr_info* info, size_t, void* paths) {
  const std::string path = info->dlpi_name != nullptr ? info->dlpi_name : "";
  const std::string name = path.substr(path.rfind('/') + 1);
  if (name.rfind("libnccl.so", 0) == 0) static_cast<std::vector<std::string>*>(paths)->push_back(path);
  return 0;
}

// The copy that names of NCCL lead to from everywhere in the process: one that is preloaded comes before what torch
// loads beside it, for torch too. Empty if there is none.
std::string copy_for_all() {
  Dl_info info{};
  void* everything = ::dlopen(nullptr, RTLD_LAZY);
  void* entry = everything != nullptr ? ::dlsym(everything, "ncclGetVersion") : nullptr;
  return entry != nullptr && ::dladdr(entry, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : "";
}

// A handle of the library in this process, or null and the reason.
void* loaded(std::string* path, std::string* reason) {
  std::vector<std::string> paths;
  dl_iterate_phdr(add_if_nccl, &paths);
  if (const std::string common = copy_for_all(); std::count(paths.begin(), paths.end(), common) == 1) paths = {common};
  if (paths.size() > 1) {
    *reason = "several copies of NCCL are in this process (" + paths[0] + ", " + paths[1] +
              "): see that torch and everything else use the same one";
    return nullptr;
  }
  if (paths.size() == 1) {
    *path = paths[0];
    void* handle = ::dlopen(path->c_str(), RTLD_NOLOAD | RTLD_LAZY);  // never closed
    if (handle == nullptr) *reason = "the NCCL of this process cannot be looked into: " + std::string(::dlerror());
    return handle;
  }
  // A file of another name, or linked into something else.
  if (void* handle = ::dlopen("libnccl.so.2", RTLD_NOLOAD | RTLD_LAZY)) {
    *path = "libnccl.so.2";
    return handle;
  }
  void* everything = ::dlopen(nullptr, RTLD_LAZY);
  if (everything != nullptr && ::dlsym(everything, "ncclGetVersion") != nullptr) {
    *path = "(part of the program)";
    return everything;
  }
  *reason = "no NCCL is loaded in this process (a torch with CUDA brings it when it is imported)";
  return nullptr;
}

template <class F>
void find(void* handle, const char* symbol, F** target) {
  *target = reinterpret_cast<F*>(::dlsym(handle, symbol));
}

Probe look(Api* entry) {
  Probe p;
  void* handle = loaded(&p.path, &p.reason);
  if (handle == nullptr) return p;
  const char* missing = nullptr;
#define TIDE_FIND(member, result, parameters)                                     \
  find(handle, "nccl" #member, &entry->member);                                   \
  if (entry->member == nullptr && missing == nullptr) missing = "nccl" #member;
  TIDE_NCCL_ENTRY_POINTS(TIDE_FIND)
#undef TIDE_FIND
  if (entry->GetVersion != nullptr && entry->GetVersion(&p.version) != kSuccess) p.version = 0;
  const std::string remedy = "install nvidia-nccl-cu13 " + version_words(kVersion) +
                             " or newer, or preload its libnccl.so.2 (LD_PRELOAD)";
  if (p.version != 0 && p.version < static_cast<int>(kVersion))
    p.reason = "NCCL " + version_words(p.version) + " is loaded (" + p.path + "), and windows with host RMA need " +
               version_words(kVersion) + ": " + remedy;
  else if (missing != nullptr)
    p.reason = "the loaded NCCL (" + p.path + ") has no " + missing + ": " + remedy;
  p.available = p.reason.empty();
  return p;
}

}  // namespace

Probe probe() {
  Library& lib = library();
  std::lock_guard<std::mutex> hold(lib.lock);
  if (lib.found) return lib.about;
  Api entry;
  const Probe p = look(&entry);
  if (p.available) {
    lib.about = p;
    lib.entry = entry;
    lib.found.store(true, std::memory_order_release);
  }
  return p;
}

const Api& api() {
  Library& lib = library();
  if (lib.found.load(std::memory_order_acquire)) return lib.entry;
  const Probe p = probe();
  if (!p.available) throw NcclError(p.reason);
  return lib.entry;
}

std::string version_words(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version % 10000 / 100) + "." +
         std::to_string(version % 100);
}

std::string describe(Result result, CommHandle comm) {
  const char* words = api().GetErrorString(result);
  const char* last = api().GetLastError(comm);
  std::string text = std::string(words != nullptr ? words : "unknown error") + " (" + std::to_string(result) + ")";
  if (last != nullptr && *last != '\0') text += std::string(": ") + last;
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
  return text;
}

void check(Result result, const char* call, CommHandle comm) {
  if (result != kSuccess) throw NcclError(std::string(call) + " failed: " + describe(result, comm));
}

}  // namespace tide::nccl
