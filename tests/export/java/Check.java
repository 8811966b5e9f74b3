import ai.jaxllm.Device;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.concurrent.atomic.AtomicReference;

/** Prints what ai.jaxllm.Device answers: FOLDER FILE "ids of a prompt" -> lines that test_java.py compares. */
public final class Check {
  public static void main(String[] arguments) throws Exception {
    int[] prompt = Arrays.stream(arguments[2].split(" ")).mapToInt(Integer::parseInt).toArray();
    try (Device device = new Device(arguments[0], 1)) {
      System.out.println("levels " + Arrays.toString(device.levels()));
      Device.Request request = new Device.Request();
      request.tokens = prompt;
      request.ignoreEnd = true;
      request.maxTokens = 12;
      List<Integer> streamed = new ArrayList<>();
      StringBuilder text = new StringBuilder();
      try (Device.Conversation talk = device.conversation()) {
        Device.Answer answer = talk.answer(request, (token, piece) -> {
          if (token >= 0) streamed.add(token);
          text.append(piece);
          return true;
        });
        System.out.println("tokens " + Arrays.toString(answer.tokens));
        System.out.println("streamed " + (streamed.toString().equals(Arrays.toString(answer.tokens)) && text.toString().equals(answer.text)));
        talk.save(arguments[1]);
        System.out.println("ended " + talk.answer(request, (token, piece) -> false).tokens.length);
        // From another thread, while the callback waits for it.
        Device.Answer cancelled = talk.answer(request, (token, piece) -> {
          Thread other = new Thread(talk::cancel);
          other.start();
          try {
            other.join();
          } catch (InterruptedException error) {
            throw new IllegalStateException(error);
          }
          return true;
        });
        System.out.println("cancelled " + cancelled.finish + " " + cancelled.tokens.length);
        try {
          talk.answer(request, (token, piece) -> {
            throw new UnsupportedOperationException("mine");
          });
        } catch (UnsupportedOperationException error) {
          System.out.println("thrown " + error.getMessage());
        }
        AtomicReference<String> busy = new AtomicReference<>();
        talk.answer(request, (token, piece) -> {
          try {
            talk.answer(request, null);
          } catch (Device.Failure error) {
            busy.set("" + error.status);
          }
          return false;
        });
        System.out.println("busy " + busy.get());
      }
      try (Device.Conversation again = device.load(arguments[1])) {
        Device.Answer answer = again.answer(request, null);
        System.out.println("loaded " + Arrays.toString(answer.tokens) + " " + answer.reusedTokens);
      }
      Device.Conversation left = device.conversation();
      request.tokens = null;
      request.messages = List.of(new Device.Message("user", "na\u00efve \ud83d\ude00"));
      System.out.println("chat " + (left.answer(request, null).promptTokens > 3));
      request.maxTokens = 0;
      try {
        left.answer(request, null);
      } catch (Device.Failure error) {
        System.out.println("refused " + error.status + " " + error.getMessage());
      }
      device.close();
      try {
        left.answer(request, null);
      } catch (IllegalStateException error) {
        System.out.println("closed " + error.getMessage());
      }
    }
    try {
      new Device(arguments[0] + "/none", 1).close();
    } catch (Device.Failure error) {
      System.out.println("missing " + error.status);
    }
  }
}
