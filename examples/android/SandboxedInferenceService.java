package com.example.inference;

import ai.jaxllm.Device;
import android.app.ondeviceintelligence.Feature;
import android.app.ondeviceintelligence.OnDeviceIntelligenceException;
import android.os.Bundle;
import android.os.CancellationSignal;
import android.os.OutcomeReceiver;
import android.os.ParcelFileDescriptor;
import android.os.PersistableBundle;
import android.service.ondeviceintelligence.OnDeviceSandboxedInferenceService;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.Executor;
import java.util.concurrent.Executors;

/**
 * The model of a system as its isolated process serves it: a sketch over ai.jaxllm.Device.
 *
 * <p>The process has no files and no network. The maker's OnDeviceIntelligenceService owns the folder, and gives
 * descriptors of program.json, tokenizer.json, chat.json and model.tflite. NOT COMPILED by this project, and run
 * nowhere: the classes android.service.ondeviceintelligence are @SystemApi of Android 15 and later, in no public
 * SDK. ai.jaxllm.Device itself is tested in a desktop's JVM. Names and types here are those of AOSP as of Android
 * 15 QPR; compare them with your tree.
 */
public final class SandboxedInferenceService extends OnDeviceSandboxedInferenceService {
  private static final String[] FILES = {"program.json", "tokenizer.json", "chat.json", "model.tflite"};
  private static final String PROMPT = "prompt", TEXT = "text", CONVERSATION = "conversation";
  // A device runs one program at a time, and answers of several callers alternate token by token.
  private final Executor answering = Executors.newFixedThreadPool(4);
  // By app and the conversation that it names; a caller reaches its own alone.
  private final Map<String, Device.Conversation> conversations = new ConcurrentHashMap<>();
  private Device device;

  private synchronized Device opened() {
    if (device != null) return device;
    List<Device.File> files = new ArrayList<>();
    List<ParcelFileDescriptor> given = new ArrayList<>();
    try {
      for (String name : FILES) {
        // By the service that owns the files; see openFileInput of the base class.
        ParcelFileDescriptor file = ParcelFileDescriptor.dup(openFileInput(name).getFD());
        given.add(file);
        files.add(new Device.File(name, file.getFd(), 0, -1));
      }
      // Descriptors are closed below: the library has mapped the model by then.
      return device = new Device(files, 0);
    } catch (java.io.IOException error) {
      throw new IllegalStateException("the model's files are not there: " + error.getMessage(), error);
    } finally {
      for (ParcelFileDescriptor each : given) android.os.FileUtils.closeQuietly(each);
    }
  }

  private Device.Answer answer(int callerUid, Bundle request, CancellationSignal signal, Device.OnText onText) {
    String name = callerUid + "/" + request.getString(CONVERSATION, "");
    Device.Conversation talk = conversations.computeIfAbsent(name, each -> opened().conversation());
    if (signal != null) signal.setOnCancelListener(talk::cancel);
    Device.Request call = new Device.Request();
    call.messages = Arrays.asList(new Device.Message("user", request.getString(PROMPT, "")));
    return talk.answer(call, onText);
  }

  @Override
  public void onProcessRequest(
      int callerUid, Feature feature, Bundle request, int requestType, CancellationSignal signal,
      android.app.ondeviceintelligence.ProcessingSignal processing,
      android.app.ondeviceintelligence.ProcessingCallback callback) {
    answering.execute(() -> {
      try {
        callback.onResult(bundleOf(answer(callerUid, request, signal, null).text));
      } catch (Device.Failure error) {
        callback.onError(failure(error));
      }
    });
  }

  @Override
  public void onProcessRequestStreaming(
      int callerUid, Feature feature, Bundle request, int requestType, CancellationSignal signal,
      android.app.ondeviceintelligence.ProcessingSignal processing,
      android.app.ondeviceintelligence.StreamingProcessingCallback callback) {
    answering.execute(() -> {
      try {
        Device.Answer found = answer(callerUid, request, signal, (token, text) -> {
          if (!text.isEmpty()) callback.onPartialResult(bundleOf(text));
          return true;
        });
        callback.onResult(bundleOf(found.text));
      } catch (Device.Failure error) {
        callback.onError(failure(error));
      }
    });
  }

  @Override
  public void onTokenInfoRequest(
      int callerUid, Feature feature, Bundle request, CancellationSignal signal,
      OutcomeReceiver<android.app.ondeviceintelligence.TokenInfo, OnDeviceIntelligenceException> result) {
    result.onError(new OnDeviceIntelligenceException(
        OnDeviceIntelligenceException.PROCESSING_ERROR_NOT_AVAILABLE, "tokens are counted by answers"));
  }

  @Override
  public void onUpdateProcessingState(
      Bundle state, OutcomeReceiver<PersistableBundle, OnDeviceIntelligenceException> result) {
    result.onResult(PersistableBundle.EMPTY);
  }

  private static Bundle bundleOf(String text) {
    Bundle found = new Bundle();
    found.putString(TEXT, text);
    return found;
  }

  private static OnDeviceIntelligenceException failure(Device.Failure error) {
    // 6 is JAXLLM_BUSY; others are the request's or the folder's (see jaxllm_device.h).
    return new OnDeviceIntelligenceException(
        error.status == 6
            ? OnDeviceIntelligenceException.PROCESSING_ERROR_BUSY
            : OnDeviceIntelligenceException.PROCESSING_ERROR_BAD_REQUEST,
        error.getMessage());
  }
}
