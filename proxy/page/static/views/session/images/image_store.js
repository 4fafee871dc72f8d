// The pictures that the page holds in memory: few are read at a time, and those that nobody shows any more are given back.
// Pure but for what it is given: `read` and `free`.

/** Holds {url, type, size} by key while somebody shows it, and then while at most `most` bytes are held in all. */
export class ImageStore {
  /** `read(key, {signal})` resolves to {url, type, size}; `free(url)` gives it back; `atOnce`: reads at a time. */
  constructor({ read, free, most = 32_000_000, atOnce = 4 }) {
    Object.assign(this, { read, free, most, atOnce });
    this.entries = new Map(); // the ones that were released last come last
    this.waiting = [];
    this.reading = 0;
    this.bytes = 0;
  }

  /** A promise of the picture. `release(key)` must follow, whatever becomes of it. */
  hold(key) {
    let entry = this.entries.get(key);
    if (entry === undefined) {
      entry = { key, users: 0, control: new AbortController() };
      entry.promise = new Promise((resolve, reject) => Object.assign(entry, { resolve, reject }));
      entry.promise.catch(() => null); // each who holds it hears of a failure
      this.entries.set(key, entry);
      this.waiting.push(entry);
      this.#next();
    }
    entry.users += 1;
    return entry.promise;
  }

  /** Say that a picture which was held is not shown any more. One that is still on its way is given up. */
  release(key) {
    const entry = this.entries.get(key);
    if (entry === undefined || entry.users === 0) return;
    entry.users -= 1;
    if (entry.users > 0) return;
    this.entries.delete(key);
    if (entry.file === undefined) this.#giveUp(entry);
    else this.entries.set(key, entry);
    this.#trim();
  }

  #giveUp(entry) {
    this.waiting = this.waiting.filter((other) => other !== entry);
    entry.control.abort();
    entry.reject(new DOMException("Nobody waits for it.", "AbortError"));
  }

  #next() {
    while (this.reading < this.atOnce && this.waiting.length > 0) this.#start(this.waiting.shift());
  }

  async #start(entry) {
    this.reading += 1;
    try {
      const file = await this.read(entry.key, { signal: entry.control.signal });
      if (this.entries.get(entry.key) !== entry) this.free(file.url);
      else {
        entry.file = file;
        this.bytes += file.size;
        entry.resolve(file);
        this.#trim();
      }
    } catch (error) {
      if (this.entries.get(entry.key) === entry) this.entries.delete(entry.key); // the next who asks tries again
      entry.reject(error);
    } finally {
      this.reading -= 1;
      this.#next();
    }
  }

  #trim() {
    for (const [key, entry] of this.entries) {
      if (this.bytes <= this.most) return;
      if (entry.users > 0 || entry.file === undefined) continue;
      this.entries.delete(key);
      this.bytes -= entry.file.size;
      this.free(entry.file.url);
    }
  }
}
