// What this browser keeps for the reader, by name. Storage may be blocked, where even asking for it throws, or full.

/** The text that is kept under a name; null without one. `storage`: localStorage, or like it. */
export function kept(name, storage) {
  try {
    return (storage ?? localStorage).getItem(name);
  } catch {
    return null;
  }
}

/** Keep a text under a name; null forgets it. Returns whether the browser does. */
export function keep(name, text, storage) {
  try {
    const place = storage ?? localStorage;
    if (text === null) place.removeItem(name);
    else place.setItem(name, text);
    return true;
  } catch {
    return false;
  }
}
