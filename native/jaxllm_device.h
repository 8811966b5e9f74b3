// Answers by a folder of exported programs (`jaxllm export --format device` or `tflite`), over LiteRT's C
// API.
//
// The library has no Python and no global state. Its only dependencies are libc, libstdc++ and libLiteRt.so.
//
// Errors. Every function that can fail returns a status, and writes a line that says what to do into `error`,
// unless that is NULL. No exception leaves the library, and bad arguments and files end no process, with one
// exception: `model.tflite` is code to LiteRT. Its checksum is compared with that of `program.json`, so that
// a damaged file is refused; a hostile one is not. Trust a folder as you would a library.
//
// Threads. A device may be used from several threads at once: programs run one at a time, so that answers of
// several conversations alternate token by token. A conversation answers one call at a time, and says
// JAXLLM_BUSY to a second one; only `jaxllm_cancel` may be called meanwhile. Close conversations before their
// device.
//
// Text is UTF-8; bytes that are none are read as U+FFFD. Arrays that a result points to stay valid until the
// next call on the same conversation.

#ifndef JAXLLM_DEVICE_H_
#define JAXLLM_DEVICE_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define JAXLLM_API __attribute__((visibility("default")))
#define JAXLLM_DEVICE_VERSION 1  // Of this interface; `jaxllm_version` has the library's.

typedef enum jaxllm_status {
  JAXLLM_OK = 0,
  JAXLLM_INVALID = 1,      // An argument is out of range.
  JAXLLM_DAMAGED = 2,      // A file is missing, damaged, or of another export than the others.
  JAXLLM_UNSUPPORTED = 3,  // The library does not support this model, tokenizer, template or level.
  JAXLLM_NO_ROOM = 4,      // The prompt does not fit the programs' caches.
  JAXLLM_MISSED = 5,       // A strict objective is met by no level.
  JAXLLM_BUSY = 6,         // The conversation answers another call.
  JAXLLM_NO_MEMORY = 7,
  JAXLLM_RUNTIME = 8,  // LiteRT fails, or logits are not finite.
  JAXLLM_SYSTEM = 9,   // The system refuses to read or write a file.
} jaxllm_status;

typedef struct jaxllm_error {
  char message[512];  // One line, ends with a NUL byte.
} jaxllm_error;

typedef struct jaxllm_device jaxllm_device;              // An open folder.
typedef struct jaxllm_conversation jaxllm_conversation;  // Tokens, and the caches that have them.

JAXLLM_API int32_t jaxllm_version(void);

// -- Folders ---------------------------------------------------------------------------------------------

// A file of a folder that another process opened, for a process that may open none. The library reads by
// position and maps the file; it neither moves nor closes the descriptor, which may be closed after the call.
typedef struct jaxllm_file {
  const char* name;  // Its name in the folder: program.json, tokenizer.json, model.tflite, chat.json.
  int descriptor;
  int64_t offset;  // Of its first byte; model.tflite begins at a multiple of 4.
  int64_t bytes;   // Its size; -1 up to the descriptor's end.
} jaxllm_file;

// Opens a folder.
//   threads: number of threads that compute; 0 for LiteRT's choice.
JAXLLM_API jaxllm_status jaxllm_open(const char* folder, int32_t threads, jaxllm_device** device,
                                     jaxllm_error* error);

// Opens a folder by descriptors of program.json, tokenizer.json and model.tflite; chat.json may be left out.
JAXLLM_API jaxllm_status jaxllm_open_files(const jaxllm_file* files, size_t count, int32_t threads,
                                           jaxllm_device** device, jaxllm_error* error);

// Compares what every level answers with what it answered where the folder was made, up to a tie of two
// tokens: a runtime that computes something else fails with JAXLLM_RUNTIME. Call it before the first answer.
//   path: file that says that this device passed, which is then not compared again, and is written when it
//         passes; NULL for none. After an update of the runtime or of the folder the comparison is made
//         again.
JAXLLM_API jaxllm_status jaxllm_check(jaxllm_device* device, const char* path, jaxllm_error* error);

// Closes a device; NULL is none.
JAXLLM_API void jaxllm_close(jaxllm_device* device);

typedef struct jaxllm_facts {
  const char* name;        // Of the model; valid while the device is open.
  const char* chat;        // Why `messages` are refused; empty if they are not.
  int32_t context_tokens;  // Most tokens of prompt and answer together.
  int32_t vocab_size;      // Of the logits.
  const int32_t* levels;   // Percents, ascending; 100 is the whole model.
  size_t level_count;
  int32_t drafts;      // Whether programs verify drafts at the whole model.
  size_t cache_bytes;  // Of the longest caches of one conversation at the whole model.
} jaxllm_facts;

JAXLLM_API jaxllm_status jaxllm_device_facts(const jaxllm_device* device, jaxllm_facts* facts,
                                             jaxllm_error* error);

// -- Tokens ----------------------------------------------------------------------------------------------

// How a text becomes tokens.
enum {
  JAXLLM_BEGIN = 1,    // With the tokens that the tokenizer adds around a text.
  JAXLLM_SPECIAL = 2,  // Special tokens spelled in the text become these tokens. Not for untrusted text.
};

// Encodes a text of `bytes` bytes. `*count` is the room of `tokens` before, the number of tokens after the
// call; without enough room the status is JAXLLM_NO_ROOM, and nothing is written but `*count`.
JAXLLM_API jaxllm_status jaxllm_encode(const jaxllm_device* device, const char* text, size_t bytes, int flags,
                                       int32_t* tokens, size_t* count, jaxllm_error* error);

// Decodes tokens, special ones as no text. `*bytes` is the room of `text` before, the size after the call, as
// in `jaxllm_encode`; no NUL byte is added.
JAXLLM_API jaxllm_status jaxllm_decode(const jaxllm_device* device, const int32_t* tokens, size_t count,
                                       char* text, size_t* bytes, jaxllm_error* error);

typedef struct jaxllm_message {
  const char* role;  // "system", "user" or "assistant", ends with a NUL byte.
  const char* content;
  size_t bytes;  // Of the content.
} jaxllm_message;

// Encodes a chat up to where the assistant's answer begins. No content becomes a special token. Room as in
// `jaxllm_encode`.
JAXLLM_API jaxllm_status jaxllm_encode_chat(const jaxllm_device* device, const jaxllm_message* messages,
                                            size_t message_count, int32_t* tokens, size_t* count,
                                            jaxllm_error* error);

// -- Levels ----------------------------------------------------------------------------------------------

// Reads this device's times of all levels from `path`, or measures them, which takes about a second, and
// keeps them there. `path` may be NULL: they are measured, and not kept. A file of other programs, another
// number of threads or another processor, or a damaged one, is measured anew. Objectives need times.
JAXLLM_API jaxllm_status jaxllm_profile(jaxllm_device* device, const char* path, jaxllm_error* error);

// Limits of an answer's times. Numbers that are 0 limit nothing.
typedef struct jaxllm_objective {
  double first_share;  // Of the whole model's time to the first token, as 0.4.
  double token_share;  // Of its time per further token.
  double first_ms;     // Milliseconds to the first token.
  double token_ms;     // Milliseconds per further token.
  int32_t strict;      // Whether to refuse, instead of taking the fastest level, if none meets it.
} jaxllm_objective;

typedef struct jaxllm_plan {
  int32_t level;
  int32_t met;      // Whether the level meets the objective.
  double first_ms;  // Its expected times.
  double token_ms;
} jaxllm_plan;

// Plans an answer to `prompt_tokens` tokens: the largest level that meets the objective.
JAXLLM_API jaxllm_status jaxllm_plan_level(const jaxllm_device* device, const jaxllm_objective* objective,
                                           size_t prompt_tokens, jaxllm_plan* plan, jaxllm_error* error);

// -- Conversations ---------------------------------------------------------------------------------------

// Begins a conversation without tokens; its memory is made by its first answer.
JAXLLM_API jaxllm_status jaxllm_conversation_new(jaxllm_device* device, jaxllm_conversation** conversation,
                                                 jaxllm_error* error);

// Ends a conversation that answers no call; NULL is none.
JAXLLM_API void jaxllm_conversation_free(jaxllm_conversation* conversation);

// Sampling options: those of the Python loop, whose answers a seed repeats unless the rounding of a sum or a
// logarithm decides.
typedef struct jaxllm_sampling {
  float temperature;         // 0 is greedy.
  int32_t top_k;             // 0 keeps all tokens.
  float top_p;               // 1 keeps all tokens.
  float min_p;               // 0 keeps all tokens.
  float repetition_penalty;  // 1 changes nothing.
  float presence_penalty;    // 0 changes nothing.
  float frequency_penalty;   // 0 changes nothing.
  uint64_t seed;
  const int32_t* bias_tokens;  // Tokens whose logits change by `biases`; -INFINITY forbids one.
  const float* biases;
  size_t bias_count;
} jaxllm_sampling;

// A token of an answer and the whole characters that it completes, which may be none or several; at the end
// the text that is left, with token -1. Returns 0 to go on; any other number ends the answer.
typedef int (*jaxllm_on_token)(void* user, int32_t token, const char* text, size_t bytes);

// A call. Fill it by `jaxllm_request_init` first. Give exactly one of messages, text and tokens.
typedef struct jaxllm_request {
  size_t size;  // Of this struct, set by `jaxllm_request_init`.

  const jaxllm_message* messages;
  size_t message_count;
  const char* text;
  size_t text_bytes;
  int text_flags;  // See `jaxllm_encode`; JAXLLM_BEGIN after init.
  const int32_t* tokens;
  size_t token_count;
  int32_t continues;  // Whether text or tokens follow the conversation's; else they are the whole prompt.

  int32_t max_tokens;  // 256 after init; fewer fit at the end of the context.
  int32_t level;       // 0 for the conversation's, at first the whole model; or by the objective.
  const jaxllm_objective* objective;  // NULL for none; needs `jaxllm_profile`.
  jaxllm_sampling sampling;           // Greedy after init.
  const int32_t* stop_tokens;         // End an answer, as the tokenizer's end tokens do.
  size_t stop_token_count;
  int32_t ignore_end;        // Whether the tokenizer's end tokens end nothing.
  const char* const* stops;  // Texts that end an answer, and are not part of it; each ends with a NUL byte.
  size_t stop_count;
  int32_t drafts;  // Whether to draft by earlier occurrences of the last tokens, which changes no answer.

  jaxllm_on_token on_token;  // NULL for none. Called by this thread, while no lock is held.
  void* user;
} jaxllm_request;

JAXLLM_API void jaxllm_request_init(jaxllm_request* request);

typedef enum jaxllm_finish {
  JAXLLM_STOPPED = 0,  // By a stop token or text.
  JAXLLM_LENGTH = 1,   // `max_tokens`, or the context is full.
  JAXLLM_CANCELLED = 2,
} jaxllm_finish;

typedef struct jaxllm_result {
  const int32_t* tokens;  // Of the answer, a stop token included.
  size_t token_count;
  const char* text;  // Of the answer, without special tokens; `text_bytes` bytes, then a NUL byte.
  size_t text_bytes;
  jaxllm_finish finish;
  jaxllm_plan plan;  // The level that answered; expected times are 0 without a profile.
  size_t prompt_tokens;
  size_t reused_tokens;  // Of the prompt, that were in the caches.
  size_t drafted_tokens;
  size_t accepted_tokens;  // Of the drafted ones.
  double first_ms;         // To the first token.
  double total_ms;
} jaxllm_result;

// Answers. The longest prefix of the prompt that the conversation's caches have is not computed again, if the
// level is theirs, so that a chat goes on in them: give all its messages each time. After an error or a
// cancel the conversation has the tokens that were computed, and can be used.
JAXLLM_API jaxllm_status jaxllm_answer(jaxllm_conversation* conversation, const jaxllm_request* request,
                                       jaxllm_result* result, jaxllm_error* error);

// Ends the conversation's current answer before its next token or chunk of the prompt; without one nothing
// happens. From any thread, also within `on_token`.
JAXLLM_API void jaxllm_cancel(jaxllm_conversation* conversation);

// The conversation's tokens: prompt and answer of its last call.
JAXLLM_API jaxllm_status jaxllm_conversation_tokens(const jaxllm_conversation* conversation,
                                                    const int32_t** tokens, size_t* count, int32_t* level,
                                                    jaxllm_error* error);

// Writes tokens and caches to a file, whole or not at all, readable by this user alone. It has a checksum.
JAXLLM_API jaxllm_status jaxllm_conversation_save(jaxllm_conversation* conversation, const char* path,
                                                  jaxllm_error* error);

// Reads them into a new conversation, to the bit. If the programs or their weights have changed, or the level
// is gone, the next answer computes the tokens again; tokens of another tokenizer are refused.
//   recomputes: set to whether that is so; may be NULL.
JAXLLM_API jaxllm_status jaxllm_conversation_load(jaxllm_device* device, const char* path,
                                                  jaxllm_conversation** conversation, int32_t* recomputes,
                                                  jaxllm_error* error);

// The same by descriptors, which are written and read from their current position. What is written is
// not atomic then.
JAXLLM_API jaxllm_status jaxllm_conversation_write(jaxllm_conversation* conversation, int descriptor,
                                                   jaxllm_error* error);
JAXLLM_API jaxllm_status jaxllm_conversation_read(jaxllm_device* device, int descriptor,
                                                  jaxllm_conversation** conversation, int32_t* recomputes,
                                                  jaxllm_error* error);

#ifdef __cplusplus
}
#endif

#endif  // JAXLLM_DEVICE_H_
