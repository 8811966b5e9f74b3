// Reads server-sent events by fetch: unlike EventSource it can send a key, and it reads answers of POST, too.

let key = sessionStorage.getItem("key") ?? "";

export function useKey(value) {
  key = value.trim();
  sessionStorage.setItem("key", key);
}

export const headers = (more = {}) => (key ? { ...more, Authorization: `Bearer ${key}` } : more);

/** Calls `take(name, data)` for each event of a response; data is text. Returns when the stream has ended. */
export async function readEvents(response, take) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", name = "message", lines = [];
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const parts = rest.split(/\r\n|\n|\r(?!$)/);
    rest = parts.pop();
    for (const line of parts) {
      if (line === "") {
        if (lines.length) take(name, lines.join("\n"));
        [name, lines] = ["message", []];
      } else if (line.startsWith("event:")) {
        name = line.slice(6).trim();
      } else if (line.startsWith("data:")) {
        lines.push(line.slice(5).replace(/^ /, ""));
      }
    }
  }
}

const QUIET_MS = 6000, LEAST_WAIT_MS = 1000, MOST_WAIT_MS = 15000;
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/** Follows events for ever, and connects again when they stop. `changed(state)`: "open", "lost", "key" where one is
 *  needed, or "operator" where this one is not an operator's. */
export async function follow(path, take, changed) {
  let wait = LEAST_WAIT_MS;
  for (;;) {
    const control = new AbortController();
    let timer;
    const heard = () => {
      clearTimeout(timer);
      timer = setTimeout(() => control.abort(), QUIET_MS);
    };
    try {
      heard();
      const response = await fetch(path, { headers: headers(), signal: control.signal, cache: "no-store" });
      if (response.status === 401 || response.status === 403) {
        await changed(response.status === 401 ? "key" : "operator");
        continue;
      }
      if (!response.ok) throw new Error(`status ${response.status}`);
      changed("open");
      wait = LEAST_WAIT_MS;
      await readEvents(response, (name, data) => {
        heard();
        try {
          take(name, JSON.parse(data));
        } catch (error) {
          // One event that cannot be shown does not end the feed.
          console.error(error);
        }
      });
    } catch {
      // The service is away, or was quiet for too long.
    } finally {
      clearTimeout(timer);
      control.abort();
    }
    changed("lost");
    await sleep(wait);
    wait = Math.min(2 * wait, MOST_WAIT_MS);
  }
}
