// Which events of the keyboard are commands of one key. Pure: no DOM.

const TYPED = "input, textarea, select, dialog, [contenteditable]";

/** Whether a key event is not a part of a text or of another command. */
export const isCommand = ({ target, ctrlKey, metaKey, altKey, isComposing, defaultPrevented }) =>
  !(ctrlKey || metaKey || altKey || isComposing || defaultPrevented || target?.closest?.(TYPED));
