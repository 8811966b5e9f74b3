// The natives of ai.jaxllm.Device, over jaxllm_device.h. Texts are arrays of UTF-8: Java's own encoding
// differs.

#include <jni.h>

#include <exception>
#include <string>
#include <vector>

#include "../jaxllm_device.h"

namespace {

constexpr const char* kPackage = "ai/jaxllm/Device";

void Throw(JNIEnv* env, int status, const std::string& message) {
  if (env->ExceptionCheck()) return;
  jclass kind = env->FindClass("ai/jaxllm/Device$Failure");
  auto size = static_cast<jsize>(message.size());
  jbyteArray bytes = kind ? env->NewByteArray(size) : nullptr;
  if (!bytes) return;
  env->SetByteArrayRegion(bytes, 0, size, reinterpret_cast<const jbyte*>(message.data()));
  jmethodID make = env->GetMethodID(kind, "<init>", "(I[B)V");
  if (make) env->Throw(static_cast<jthrowable>(env->NewObject(kind, make, static_cast<jint>(status), bytes)));
}

// Whether a call succeeded; else an exception is pending.
bool Done(JNIEnv* env, jaxllm_status status, const jaxllm_error& error) {
  if (status != JAXLLM_OK) Throw(env, status, error.message);
  return status == JAXLLM_OK;
}

// Runs work whose C++ exceptions become Java's.
template <typename Work>
auto Guarded(JNIEnv* env, const Work& work) -> decltype(work()) {
  try {
    return work();
  } catch (const std::exception& error) {
    Throw(env, JAXLLM_NO_MEMORY, error.what());
  }
  return decltype(work())();
}

std::string Bytes(JNIEnv* env, jbyteArray from) {
  std::string found(from ? static_cast<size_t>(env->GetArrayLength(from)) : 0, '\0');
  if (!found.empty())
    env->GetByteArrayRegion(from, 0, static_cast<jsize>(found.size()),
                            reinterpret_cast<jbyte*>(found.data()));
  return found;
}

std::vector<std::string> Lists(JNIEnv* env, jobjectArray from) {
  std::vector<std::string> found;
  for (jsize each = 0; from && each < env->GetArrayLength(from); ++each) {
    auto bytes = static_cast<jbyteArray>(env->GetObjectArrayElement(from, each));
    found.push_back(Bytes(env, bytes));
    env->DeleteLocalRef(bytes);
  }
  return found;
}

std::vector<jint> Ints(JNIEnv* env, jintArray from) {
  std::vector<jint> found(from ? static_cast<size_t>(env->GetArrayLength(from)) : 0);
  if (!found.empty()) env->GetIntArrayRegion(from, 0, static_cast<jsize>(found.size()), found.data());
  return found;
}

std::vector<jlong> Longs(JNIEnv* env, jlongArray from) {
  std::vector<jlong> found(static_cast<size_t>(env->GetArrayLength(from)));
  if (!found.empty()) env->GetLongArrayRegion(from, 0, static_cast<jsize>(found.size()), found.data());
  return found;
}

jintArray Made(JNIEnv* env, const int32_t* from, size_t count) {
  jintArray made = env->NewIntArray(static_cast<jsize>(count));
  if (made && count) env->SetIntArrayRegion(made, 0, static_cast<jsize>(count), from);
  return made;
}

jbyteArray Made(JNIEnv* env, const char* from, size_t count) {
  jbyteArray made = env->NewByteArray(static_cast<jsize>(count));
  if (made && count)
    env->SetByteArrayRegion(made, 0, static_cast<jsize>(count), reinterpret_cast<const jbyte*>(from));
  return made;
}

template <typename T>
T* Of(jlong handle) {
  return reinterpret_cast<T*>(handle);
}

struct Callback {
  JNIEnv* env;
  jobject target;
  jmethodID method;
  jmethodID text_of;
  jclass text_class;
  jobject charset;
};

// Texts to Java by its own decoder.
int OnToken(void* user, int32_t token, const char* text, size_t bytes) {
  auto* to = static_cast<Callback*>(user);
  jbyteArray raw = Made(to->env, text, bytes);
  jobject made = raw ? to->env->NewObject(to->text_class, to->text_of, raw, to->charset) : nullptr;
  bool more = made && to->env->CallBooleanMethod(to->target, to->method, static_cast<jint>(token), made);
  bool failed = to->env->ExceptionCheck();
  to->env->DeleteLocalRef(raw);
  to->env->DeleteLocalRef(made);
  return !more || failed;
}

bool Prepare(Callback& to) {
  JNIEnv* env = to.env;
  jclass kind = env->FindClass((std::string(kPackage) + "$OnText").c_str());
  to.method = kind ? env->GetMethodID(kind, "onText", "(ILjava/lang/String;)Z") : nullptr;
  to.text_class = env->FindClass("java/lang/String");
  if (!to.method || !to.text_class) return false;
  to.text_of = env->GetMethodID(to.text_class, "<init>", "([BLjava/nio/charset/Charset;)V");
  jclass charsets = env->FindClass("java/nio/charset/StandardCharsets");
  jfieldID utf8 = charsets ? env->GetStaticFieldID(charsets, "UTF_8", "Ljava/nio/charset/Charset;") : nullptr;
  to.charset = utf8 ? env->GetStaticObjectField(charsets, utf8) : nullptr;
  return to.text_of && to.charset;
}

jlong Open(JNIEnv* env, jclass, jbyteArray folder, jint threads) {
  return Guarded(env, [&]() -> jlong {
    jaxllm_device* device = nullptr;
    jaxllm_error error;
    Done(env, jaxllm_open(Bytes(env, folder).c_str(), threads, &device, &error), error);
    return reinterpret_cast<jlong>(device);
  });
}

jlong OpenFiles(JNIEnv* env, jclass, jobjectArray names, jintArray descriptors, jlongArray offsets,
                jlongArray sizes, jint threads) {
  return Guarded(env, [&]() -> jlong {
    std::vector<std::string> named = Lists(env, names);
    std::vector<jint> numbers = Ints(env, descriptors);
    std::vector<jlong> at = Longs(env, offsets), bytes = Longs(env, sizes);
    std::vector<jaxllm_file> files;
    for (size_t each = 0; each < named.size(); ++each)
      files.push_back({named[each].c_str(), numbers[each], at[each], bytes[each]});
    jaxllm_device* device = nullptr;
    jaxllm_error error;
    Done(env, jaxllm_open_files(files.data(), files.size(), threads, &device, &error), error);
    return reinterpret_cast<jlong>(device);
  });
}

void Close(JNIEnv*, jclass, jlong device) { jaxllm_close(Of<jaxllm_device>(device)); }

jintArray Levels(JNIEnv* env, jclass, jlong device) {
  jaxllm_facts facts;
  jaxllm_error error;
  bool done = Done(env, jaxllm_device_facts(Of<jaxllm_device>(device), &facts, &error), error);
  return done ? Made(env, facts.levels, facts.level_count) : nullptr;
}

void Profile(JNIEnv* env, jclass, jlong device, jbyteArray path) {
  Guarded(env, [&] {
    jaxllm_error error;
    std::string place = Bytes(env, path);
    Done(env, jaxllm_profile(Of<jaxllm_device>(device), path ? place.c_str() : nullptr, &error), error);
  });
}

jlong Make(JNIEnv* env, jclass, jlong device, jbyteArray path) {
  return Guarded(env, [&]() -> jlong {
    jaxllm_conversation* made = nullptr;
    jaxllm_error error;
    auto* of = Of<jaxllm_device>(device);
    Done(env,
         path ? jaxllm_conversation_load(of, Bytes(env, path).c_str(), &made, nullptr, &error)
              : jaxllm_conversation_new(of, &made, &error),
         error);
    return reinterpret_cast<jlong>(made);
  });
}

void Free(JNIEnv*, jclass, jlong conversation) {
  jaxllm_conversation_free(Of<jaxllm_conversation>(conversation));
}

void Cancel(JNIEnv*, jclass, jlong conversation) { jaxllm_cancel(Of<jaxllm_conversation>(conversation)); }

void Save(JNIEnv* env, jclass, jlong conversation, jbyteArray path) {
  Guarded(env, [&] {
    jaxllm_error error;
    Done(env,
         jaxllm_conversation_save(Of<jaxllm_conversation>(conversation), Bytes(env, path).c_str(), &error),
         error);
  });
}

jobjectArray Answer(JNIEnv* env, jclass, jlong conversation, jobjectArray roles, jobjectArray contents,
                    jbyteArray text, jintArray tokens, jintArray numbers, jdoubleArray reals, jlong seed,
                    jobjectArray stops, jobject on_text) {
  return Guarded(env, [&]() -> jobjectArray {
    std::vector<std::string> role = Lists(env, roles), content = Lists(env, contents),
                             stop = Lists(env, stops);
    std::string prompt = Bytes(env, text);
    std::vector<jint> ids = Ints(env, tokens), given = Ints(env, numbers);
    double real[6] = {};
    env->GetDoubleArrayRegion(reals, 0, 6, real);
    std::vector<jaxllm_message> messages;
    for (size_t each = 0; each < role.size(); ++each)
      messages.push_back({role[each].c_str(), content[each].data(), content[each].size()});
    std::vector<const char*> ends;
    for (const std::string& each : stop) ends.push_back(each.c_str());
    jaxllm_request request;
    jaxllm_request_init(&request);
    static const jaxllm_message kNone = {};
    static const int32_t kNoToken = 0;
    // Empty lists are no missing ones.
    if (roles) request.messages = messages.empty() ? &kNone : messages.data();
    request.message_count = messages.size();
    if (text) request.text = prompt.data();
    request.text_bytes = prompt.size();
    if (tokens) request.tokens = ids.empty() ? &kNoToken : ids.data();
    request.token_count = ids.size();
    request.continues = given[0];
    request.ignore_end = given[1];
    request.drafts = given[2];
    request.max_tokens = given[3];
    request.level = given[4];
    request.sampling.top_k = given[5];
    jaxllm_objective objective = {real[0], real[1], 0, 0, 0};
    if (real[0] != 0 || real[1] != 0) request.objective = &objective;
    request.sampling.temperature = static_cast<float>(real[2]);
    request.sampling.top_p = static_cast<float>(real[3]);
    request.sampling.min_p = static_cast<float>(real[4]);
    request.sampling.repetition_penalty = static_cast<float>(real[5]);
    request.sampling.seed = static_cast<uint64_t>(seed);
    request.stops = ends.data();
    request.stop_count = ends.size();
    Callback callback = {env, on_text, nullptr, nullptr, nullptr, nullptr};
    if (on_text) {
      if (!Prepare(callback)) return nullptr;
      request.on_token = OnToken;
      request.user = &callback;
    }
    jaxllm_result result;
    jaxllm_error error;
    auto* of = Of<jaxllm_conversation>(conversation);
    jaxllm_status status = jaxllm_answer(of, &request, &result, &error);
    // An exception of the callback comes first.
    if (env->ExceptionCheck() || !Done(env, status, error)) return nullptr;
    const double facts[] = {static_cast<double>(result.finish),
                            static_cast<double>(result.plan.level),
                            static_cast<double>(result.prompt_tokens),
                            static_cast<double>(result.reused_tokens),
                            result.first_ms,
                            result.total_ms};
    jobjectArray found = env->NewObjectArray(3, env->FindClass("java/lang/Object"), nullptr);
    jbyteArray words = Made(env, result.text, result.text_bytes);
    jintArray drawn = Made(env, result.tokens, result.token_count);
    jdoubleArray said = env->NewDoubleArray(6);
    if (!found || !words || !drawn || !said) return nullptr;
    env->SetDoubleArrayRegion(said, 0, 6, facts);
    env->SetObjectArrayElement(found, 0, words);
    env->SetObjectArrayElement(found, 1, drawn);
    env->SetObjectArrayElement(found, 2, said);
    return found;
  });
}

}  // namespace

extern "C" JNIEXPORT jint JNICALL JNI_OnLoad(JavaVM* machine, void*) {
  JNIEnv* env = nullptr;
  if (machine->GetEnv(reinterpret_cast<void**>(&env), JNI_VERSION_1_6) != JNI_OK) return JNI_ERR;
  jclass kind = env->FindClass(kPackage);
  auto method = [](const char* name, const char* types, auto* to) {
    return JNINativeMethod{const_cast<char*>(name), const_cast<char*>(types), reinterpret_cast<void*>(to)};
  };
  const JNINativeMethod methods[] = {
      method("open", "([BI)J", Open),
      method("openFiles", "([[B[I[J[JI)J", OpenFiles),
      method("close", "(J)V", Close),
      method("levels", "(J)[I", Levels),
      method("profile", "(J[B)V", Profile),
      method("make", "(J[B)J", Make),
      method("free", "(J)V", Free),
      method("cancel", "(J)V", Cancel),
      method("save", "(J[B)V", Save),
      method("answer", "(J[[B[[B[B[I[I[DJ[[BLai/jaxllm/Device$OnText;)[Ljava/lang/Object;", Answer),
  };
  bool done = kind && env->RegisterNatives(kind, methods, sizeof(methods) / sizeof(methods[0])) == JNI_OK;
  return done ? JNI_VERSION_1_6 : JNI_ERR;
}
