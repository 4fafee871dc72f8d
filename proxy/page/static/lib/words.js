// Words of the API as people write them. Pure.

/** A word of the API as people write it: "system_changed" as "system changed". */
export const inWords = (word) => String(word).replaceAll("_", " ");
