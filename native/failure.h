// Errors inside the library, which the C interface turns into a status and a message.

#pragma once

#include <exception>
#include <string>
#include <utility>

#include "jaxllm_device.h"

namespace jaxllm {

class Failure : public std::exception {
 public:
  Failure(jaxllm_status status, std::string message) : status_(status), message_(std::move(message)) {}
  const char* what() const noexcept override { return message_.c_str(); }
  jaxllm_status status() const { return status_; }

 private:
  jaxllm_status status_;
  std::string message_;
};

inline void Require(bool condition, jaxllm_status status, const std::string& message) {
  if (!condition) throw Failure(status, message);
}

}  // namespace jaxllm
