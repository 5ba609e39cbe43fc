// Arguments that are numbers within bounds.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace tide {

// Throws std::invalid_argument, with what was given and what is allowed.
inline void between(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high)
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + "; allowed: " +
                                std::to_string(low) + " to " + std::to_string(high));
}

}  // namespace tide
