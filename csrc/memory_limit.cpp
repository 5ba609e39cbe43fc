#include "memory_limit.h"

#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace tide {
namespace {

struct Hierarchy {
  std::string mount;  // where the memory controller's hierarchy is mounted
  std::string root;   // the cgroup that the mount point shows
  bool v2 = false;
};

bool read_number(const std::string& path, uint64_t* value) {
  std::ifstream in(path);
  std::string word;
  if (!(in >> word)) return false;
  if (word == "max") {
    *value = kUnlimited;
    return true;
  }
  char* end = nullptr;
  errno = 0;
  *value = std::strtoull(word.c_str(), &end, 10);
  return errno == 0 && end != word.c_str();
}

// The value of `key` in a file of "key value" lines; 0 if absent.
uint64_t read_keyed(const std::string& path, const std::string& key) {
  std::ifstream in(path);
  std::string name;
  uint64_t value = 0;
  std::string line;
  while (std::getline(in, line)) {
    std::istringstream words(line);
    if (words >> name >> value && name == key) return value;
  }
  return 0;
}

bool contains_option(const std::string& options, const std::string& wanted) {
  std::istringstream in(options);
  std::string option;
  while (std::getline(in, option, ','))
    if (option == wanted) return true;
  return false;
}

std::vector<Hierarchy> memory_hierarchies(const std::string& proc) {
  std::vector<Hierarchy> found;
  std::ifstream in(proc + "/self/mountinfo");
  std::string line;
  while (std::getline(in, line)) {
    // id parent dev root mount options [optional...] - fstype source super_options
    const size_t dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    std::istringstream head(line.substr(0, dash)), tail(line.substr(dash + 3));
    std::string skip, type, source, options;
    Hierarchy h;
    head >> skip >> skip >> skip >> h.root >> h.mount;
    tail >> type >> source >> options;
    h.v2 = type == "cgroup2";
    if (h.v2 || (type == "cgroup" && contains_option(options, "memory"))) found.push_back(h);
  }
  return found;
}

// This process's cgroup in the v2 hierarchy, or in the v1 one of the memory controller.
std::string own_cgroup(const std::string& proc, bool v2) {
  std::ifstream in(proc + "/self/cgroup");
  std::string line;
  while (std::getline(in, line)) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (v2 ? controllers.empty() : contains_option(controllers, "memory")) return line.substr(second + 1);
  }
  return "/";
}

// Limit minus usage of one cgroup. Page cache that the kernel would give back before killing anybody
// counts as free: all of the inactive part and half of the active one (much as MemAvailable does).
uint64_t room_in(const std::string& dir, bool v2) {
  uint64_t limit = 0, usage = 0;
  if (!read_number(dir + (v2 ? "/memory.max" : "/memory.limit_in_bytes"), &limit)) return kUnlimited;
  if (limit >= (uint64_t{1} << 62)) return kUnlimited;  // v1 writes "no limit" as a huge number
  if (!read_number(dir + (v2 ? "/memory.current" : "/memory.usage_in_bytes"), &usage)) return kUnlimited;
  const std::string prefix = v2 ? "" : "total_";
  const uint64_t cache = read_keyed(dir + "/memory.stat", prefix + "inactive_file") +
                         read_keyed(dir + "/memory.stat", prefix + "active_file") / 2;
  usage -= std::min(usage, cache);
  return limit > usage ? limit - usage : 0;
}

uint64_t room_in_hierarchy(const Hierarchy& h, const std::string& proc) {
  std::string path = own_cgroup(proc, h.v2);
  // In a container the mount may show only a subtree, while /proc names the cgroup from the true root.
  if (h.root != "/" && path.compare(0, h.root.size(), h.root) == 0) path = path.substr(h.root.size());
  struct stat st;
  if (::stat((h.mount + path).c_str(), &st) != 0) path = "";
  uint64_t room = kUnlimited;
  while (true) {
    room = std::min(room, room_in(h.mount + path, h.v2));
    const size_t slash = path.rfind('/');
    if (slash == std::string::npos) break;
    path.resize(slash);
  }
  return room;
}

uint64_t memory_available(const std::string& proc) {
  const uint64_t kib = read_keyed(proc + "/meminfo", "MemAvailable:");
  return kib == 0 ? kUnlimited : kib * 1024;
}

}  // namespace

uint64_t file_size_limit() {
  struct rlimit limit;
  if (::getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return kUnlimited;
  return limit.rlim_cur;
}

uint64_t available_bytes(const std::string& proc) {
  uint64_t room = std::min(file_size_limit(), memory_available(proc));
  for (const Hierarchy& h : memory_hierarchies(proc)) room = std::min(room, room_in_hierarchy(h, proc));
  return room;
}

}  // namespace tide
