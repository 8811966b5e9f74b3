// The C interface: no exception leaves it.

#include <fcntl.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <new>

#include "device.h"
#include "system.h"

namespace {

using namespace jaxllm;

constexpr int32_t kMostThreads = 1 << 10, kDefaultAnswer = 256;

void Say(jaxllm_error* error, const char* message) {
  if (error) std::snprintf(error->message, sizeof(error->message), "%s", message);
}

template <typename Work>
jaxllm_status Guarded(jaxllm_error* error, const Work& work) noexcept {
  Say(error, "");
  try {
    work();
    return JAXLLM_OK;
  } catch (const Failure& failure) {
    Say(error, failure.what());
    return failure.status();
  } catch (const std::bad_alloc&) {
    Say(error, "there is not enough memory; close conversations, or take a smaller model");
    return JAXLLM_NO_MEMORY;
  } catch (const std::exception& other) {
    Say(error, other.what());
  } catch (...) {
    Say(error, "an unknown error");
  }
  return JAXLLM_RUNTIME;
}

void Given(bool condition, const char* what) {
  Require(condition, JAXLLM_INVALID, std::string(what) + " is NULL; give one");
}

// Copies results into the caller's room.
template <typename To, typename From>
void Fill(const From& found, To* to, size_t* count) {
  Given(count, "the number of places");
  size_t room = std::exchange(*count, found.size());
  Require(found.size() <= room, JAXLLM_NO_ROOM,
          "there are " + std::to_string(found.size()) + " results, and room for " + std::to_string(room));
  if (!found.empty()) std::memcpy(to, found.data(), found.size() * sizeof(To));
}

// A conversation that one call has for itself.
class Taken {
 public:
  explicit Taken(jaxllm_conversation* conversation) : conversation_(conversation) {
    Given(conversation, "the conversation");
    Require(!conversation->busy.exchange(true), JAXLLM_BUSY,
            "the conversation answers another call; wait for it, or cancel it");
  }
  Taken(const Taken&) = delete;
  ~Taken() { conversation_->busy = false; }

 private:
  jaxllm_conversation* conversation_;
};

void Threads(int32_t threads) {
  Require(threads >= 0 && threads <= kMostThreads, JAXLLM_INVALID, "threads must be 0 to 1,024");
}

void ReadConversation(jaxllm_device* device, int descriptor, int64_t offset,
                      jaxllm_conversation** conversation, int32_t* recomputes) {
  Mapped file(descriptor, offset, -1, "the file of the conversation");
  auto made = std::make_unique<jaxllm_conversation>(*device);
  bool again = made->Restore(file.view());
  if (recomputes) *recomputes = again;
  *conversation = made.release();
}

}  // namespace

int32_t jaxllm_version(void) { return JAXLLM_DEVICE_VERSION; }

jaxllm_status jaxllm_open(const char* folder, int32_t threads, jaxllm_device** device, jaxllm_error* error) {
  return Guarded(error, [&] {
    Given(folder && device, "the folder or the device");
    Threads(threads);
    *device = nullptr;
    *device = new jaxllm_device(threads, std::string(folder));
  });
}

jaxllm_status jaxllm_open_files(const jaxllm_file* files, size_t count, int32_t threads,
                                jaxllm_device** device, jaxllm_error* error) {
  return Guarded(error, [&] {
    Given(files && device, "the files or the device");
    Threads(threads);
    *device = nullptr;
    *device = new jaxllm_device(threads, files, count);
  });
}

void jaxllm_close(jaxllm_device* device) { delete device; }

jaxllm_status jaxllm_device_facts(const jaxllm_device* device, jaxllm_facts* facts, jaxllm_error* error) {
  return Guarded(error, [&] {
    Given(device && facts, "the device or the facts");
    const Manifest& manifest = device->folder.manifest;
    int longest = device->programs.Rooms(kWhole).back();
    *facts = {};
    facts->name = manifest.name.c_str();
    facts->chat = device->folder.chat.refused.c_str();
    facts->context_tokens = manifest.context_tokens;
    facts->vocab_size = device->vocab(kWhole);
    facts->levels = device->levels.data();
    facts->level_count = device->levels.size();
    facts->drafts = !device->programs.Sizes("verify", kWhole, longest).empty();
    facts->cache_bytes = device->programs.RowBytes(kWhole) * static_cast<size_t>(longest);
  });
}

jaxllm_status jaxllm_encode(const jaxllm_device* device, const char* text, size_t bytes, int flags,
                            int32_t* tokens, size_t* count, jaxllm_error* error) {
  return Guarded(error, [&] {
    Given(device && (text || !bytes), "the device or the text");
    MarkedText marked;
    marked.Add({text ? text : "", bytes}, !(flags & JAXLLM_SPECIAL));
    Fill(device->folder.tokenizer->Encode(marked, flags & JAXLLM_BEGIN), tokens, count);
  });
}

jaxllm_status jaxllm_decode(const jaxllm_device* device, const int32_t* tokens, size_t count, char* text,
                            size_t* bytes, jaxllm_error* error) {
  return Guarded(error, [&] {
    Given(device && (tokens || !count), "the device or the tokens");
    Detokenizer detokenizer(*device->folder.tokenizer);
    std::string found;
    for (size_t each = 0; each < count; ++each) found += detokenizer.Push(tokens[each]);
    found += detokenizer.Flush();
    Fill(found, text, bytes);
  });
}

jaxllm_status jaxllm_encode_chat(const jaxllm_device* device, const jaxllm_message* messages,
                                 size_t message_count, int32_t* tokens, size_t* count, jaxllm_error* error) {
  return Guarded(error, [&] {
    Given(device, "the device");
    const Folder& folder = device->folder;
    Fill(folder.tokenizer->Encode(folder.chat.Render(messages, message_count), false), tokens, count);
  });
}

jaxllm_status jaxllm_check(jaxllm_device* device, const char* path, jaxllm_error* error) {
  return Guarded(error, [&] {
    Given(device, "the device");
    RequireGolden(device->programs, device->folder.manifest, path);
  });
}

jaxllm_status jaxllm_profile(jaxllm_device* device, const char* path, jaxllm_error* error) {
  return Guarded(error, [&] {
    Given(device, "the device");
    Times times = ProfiledTimes(device->programs, device->folder.manifest, path);
    std::lock_guard<std::mutex> lock(device->timing);
    device->times = std::move(times);
  });
}

jaxllm_status jaxllm_plan_level(const jaxllm_device* device, const jaxllm_objective* objective,
                                size_t prompt_tokens, jaxllm_plan* plan, jaxllm_error* error) {
  return Guarded(error, [&] {
    Given(device && objective && plan, "the device, the objective or the plan");
    auto most = static_cast<size_t>(device->folder.manifest.context_tokens);
    Require(prompt_tokens >= 1 && prompt_tokens <= most, JAXLLM_INVALID,
            "prompt_tokens must be 1 to the context");
    *plan = device->Plan(*objective, prompt_tokens);
  });
}

jaxllm_status jaxllm_conversation_new(jaxllm_device* device, jaxllm_conversation** conversation,
                                      jaxllm_error* error) {
  return Guarded(error, [&] {
    Given(device && conversation, "the device or the conversation");
    *conversation = new jaxllm_conversation(*device);
  });
}

void jaxllm_conversation_free(jaxllm_conversation* conversation) { delete conversation; }

void jaxllm_request_init(jaxllm_request* request) {
  *request = {};
  request->size = sizeof(*request);
  request->text_flags = JAXLLM_BEGIN;
  request->max_tokens = kDefaultAnswer;
  request->sampling.top_p = request->sampling.repetition_penalty = 1;
}

jaxllm_status jaxllm_answer(jaxllm_conversation* conversation, const jaxllm_request* request,
                            jaxllm_result* result, jaxllm_error* error) {
  return Guarded(error, [&] {
    Given(request && result, "the request or the result");
    Taken taken(conversation);
    conversation->cancelled = false;
    conversation->Answer(*request, result);
  });
}

void jaxllm_cancel(jaxllm_conversation* conversation) {
  if (conversation) conversation->cancelled = true;
}

jaxllm_status jaxllm_conversation_tokens(const jaxllm_conversation* conversation, const int32_t** tokens,
                                         size_t* count, int32_t* level, jaxllm_error* error) {
  return Guarded(error, [&] {
    Given(conversation && tokens && count && level, "the conversation or a result");
    *tokens = conversation->tokens.data();
    *count = conversation->tokens.size();
    *level = conversation->level;
  });
}

jaxllm_status jaxllm_conversation_save(jaxllm_conversation* conversation, const char* path,
                                       jaxllm_error* error) {
  return Guarded(error, [&] {
    Given(path, "the path");
    Taken taken(conversation);
    WriteFile(path, conversation->Stored());
  });
}

jaxllm_status jaxllm_conversation_write(jaxllm_conversation* conversation, int descriptor,
                                        jaxllm_error* error) {
  return Guarded(error, [&] {
    Taken taken(conversation);
    WriteAll(descriptor, conversation->Stored());
  });
}

jaxllm_status jaxllm_conversation_load(jaxllm_device* device, const char* path,
                                       jaxllm_conversation** conversation, int32_t* recomputes,
                                       jaxllm_error* error) {
  return Guarded(error, [&] {
    Given(device && path && conversation, "the device, the path or the conversation");
    Descriptor file(open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    Require(file.number() >= 0, JAXLLM_SYSTEM, std::string(path) + ": " + std::strerror(errno));
    ReadConversation(device, file.number(), 0, conversation, recomputes);
  });
}

jaxllm_status jaxllm_conversation_read(jaxllm_device* device, int descriptor,
                                       jaxllm_conversation** conversation, int32_t* recomputes,
                                       jaxllm_error* error) {
  return Guarded(error, [&] {
    Given(device && conversation, "the device or the conversation");
    off_t at = lseek(descriptor, 0, SEEK_CUR);
    Require(at >= 0, JAXLLM_SYSTEM, std::string("the file of the conversation: ") + std::strerror(errno));
    ReadConversation(device, descriptor, at, conversation, recomputes);
  });
}
