package ai.jaxllm;

import java.nio.charset.StandardCharsets;
import java.util.Collections;
import java.util.List;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.locks.ReadWriteLock;
import java.util.concurrent.locks.ReentrantReadWriteLock;

/**
 * Answers by a folder of exported programs: libjaxllm_device from Java and Kotlin (see jaxllm_device.h, which says
 * what each call does). Threads may share a device; a conversation answers one call at a time. Whatever is refused
 * is a {@link Failure}.
 */
public final class Device implements AutoCloseable {
  /** What the library says, and the number of its status: JAXLLM_INVALID is 1. */
  public static final class Failure extends RuntimeException {
    private static final long serialVersionUID = 1;
    public final int status;

    Failure(int status, byte[] message) {
      super(new String(message, StandardCharsets.UTF_8));
      this.status = status;
    }
  }

  /** Receives an answer as it is drawn, by the thread that asks for it. */
  public interface OnText {
    /** Takes a token (-1 at the end) and the whole characters that it completes; false ends the answer. */
    boolean onText(int token, String text);
  }

  public static final class Message {
    final byte[] role, content;

    public Message(String role, String content) {
      this.role = utf8(role);
      this.content = utf8(content);
    }
  }

  /** A file of a folder by its descriptor, as ParcelFileDescriptor.getFd() and AssetFileDescriptor give it. */
  public static final class File {
    final byte[] name;
    final int descriptor;
    final long offset, bytes;

    public File(String name, int descriptor, long offset, long bytes) {
      this.name = utf8(name);
      this.descriptor = descriptor;
      this.offset = offset;
      this.bytes = bytes;
    }
  }

  /** A call: give exactly one of messages, text and tokens. */
  public static final class Request {
    public List<Message> messages;
    public String text;
    public int[] tokens;
    public boolean continues, ignoreEnd, drafts;
    public int maxTokens = 256, level = 0;
    /** Shares of the whole model's times to the first and per further token; 0 limits nothing. */
    public double firstShare, tokenShare;
    public float temperature, topP = 1, minP, repetitionPenalty = 1;
    public int topK;
    public long seed;
    public List<String> stops = Collections.emptyList();
  }

  public static final class Answer {
    public final String text;
    public final int[] tokens;
    /** 0 by a stop token or text, 1 by length, 2 cancelled. */
    public final int finish;
    public final int level, promptTokens, reusedTokens;
    public final double firstMs, totalMs;

    Answer(byte[] text, int[] tokens, double[] facts) {
      this.text = new String(text, StandardCharsets.UTF_8);
      this.tokens = tokens;
      finish = (int) facts[0];
      level = (int) facts[1];
      promptTokens = (int) facts[2];
      reusedTokens = (int) facts[3];
      firstMs = facts[4];
      totalMs = facts[5];
    }
  }

  /** Tokens, and the caches that have them. */
  public final class Conversation implements AutoCloseable {
    private long handle;
    // Held for reading by calls, so that closing waits for them.
    private final ReadWriteLock closing = new ReentrantReadWriteLock();

    private Conversation(long handle) {
      this.handle = handle;
      conversations.add(this);
    }

    /** Answers; `onText` may be null. */
    public Answer answer(Request request, OnText onText) {
      byte[][] roles = null, contents = null;
      if (request.messages != null) {
        roles = request.messages.stream().map(each -> each.role).toArray(byte[][]::new);
        contents = request.messages.stream().map(each -> each.content).toArray(byte[][]::new);
      }
      byte[][] stops = request.stops.stream().map(each -> (each + "\0").getBytes(StandardCharsets.UTF_8)).toArray(byte[][]::new);
      int[] numbers = {
        request.continues ? 1 : 0, request.ignoreEnd ? 1 : 0, request.drafts ? 1 : 0, request.maxTokens, request.level,
        request.topK,
      };
      double[] reals = {
        request.firstShare, request.tokenShare, request.temperature, request.topP, request.minP, request.repetitionPenalty,
      };
      byte[] text = request.text == null ? null : utf8(request.text);
      closing.readLock().lock();
      try {
        Object[] found =
            Device.answer(open(), roles, contents, text, request.tokens, numbers, reals, request.seed, stops, onText);
        return new Answer((byte[]) found[0], (int[]) found[1], (double[]) found[2]);
      } finally {
        closing.readLock().unlock();
      }
    }

    /** Ends the current answer, from any thread. */
    public void cancel() {
      closing.readLock().lock();
      try {
        if (handle != 0) Device.cancel(handle);
      } finally {
        closing.readLock().unlock();
      }
    }

    /** Writes it to a file, whole or not at all. */
    public void save(String path) {
      closing.readLock().lock();
      try {
        Device.save(open(), utf8(path));
      } finally {
        closing.readLock().unlock();
      }
    }

    private long open() {
      if (handle == 0) throw new IllegalStateException("the conversation is closed");
      return handle;
    }

    /** Cancels its answer, waits for that, and frees its memory. Not within `onText`. */
    @Override
    public void close() {
      cancel();
      closing.writeLock().lock();
      try {
        if (handle != 0) Device.free(handle);
        handle = 0;
        conversations.remove(this);
      } finally {
        closing.writeLock().unlock();
      }
    }
  }

  private long handle;
  private final Set<Conversation> conversations = ConcurrentHashMap.newKeySet();

  static {
    System.loadLibrary("jaxllm_device_jni");
  }

  /** Opens a folder; 0 threads are LiteRT's choice. */
  public Device(String folder, int threads) {
    handle = open(utf8(folder), threads);
  }

  /** Opens a folder by the descriptors of its files, which may be closed afterwards. */
  public Device(List<File> files, int threads) {
    handle = openFiles(
        files.stream().map(each -> each.name).toArray(byte[][]::new),
        files.stream().mapToInt(each -> each.descriptor).toArray(),
        files.stream().mapToLong(each -> each.offset).toArray(),
        files.stream().mapToLong(each -> each.bytes).toArray(),
        threads);
  }

  /** Levels in percent, ascending. */
  public synchronized int[] levels() {
    return levels(open());
  }

  /** Reads this device's times from a file, or measures them and keeps them there; null keeps none. */
  public synchronized void profile(String path) {
    profile(open(), path == null ? null : utf8(path));
  }

  /** Begins a conversation. */
  public synchronized Conversation conversation() {
    return new Conversation(make(open(), null));
  }

  /** Reads a conversation from a file. */
  public synchronized Conversation load(String path) {
    return new Conversation(make(open(), utf8(path)));
  }

  /** Closes all conversations, and frees the model. */
  @Override
  public synchronized void close() {
    for (Conversation each : conversations) each.close();
    if (handle != 0) close(handle);
    handle = 0;
  }

  private long open() {
    if (handle == 0) throw new IllegalStateException("the device is closed");
    return handle;
  }

  private static byte[] utf8(String text) {
    return text.getBytes(StandardCharsets.UTF_8);
  }

  private static native long open(byte[] folder, int threads);

  private static native long openFiles(byte[][] names, int[] descriptors, long[] offsets, long[] bytes, int threads);

  private static native void close(long device);

  private static native int[] levels(long device);

  private static native void profile(long device, byte[] path);

  private static native long make(long device, byte[] path);

  private static native void free(long conversation);

  private static native void cancel(long conversation);

  private static native void save(long conversation, byte[] path);

  private static native Object[] answer(
      long conversation, byte[][] roles, byte[][] contents, byte[] text, int[] tokens, int[] numbers, double[] reals,
      long seed, byte[][] stops, OnText onText);
}
