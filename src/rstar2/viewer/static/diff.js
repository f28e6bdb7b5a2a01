// The common words of two texts: the longest common subsequence, bounded.

const MOST = 1500;  // words of each side that are compared; the rest is shown as different

const split = (text) => text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) || [];

/** [[same?, text], ...] for each side. */
export function diff(left, right) {
  const a = split(left), b = split(right);
  let head = 0;
  while (head < a.length && head < b.length && a[head] === b[head]) head++;
  let tail = 0;
  while (tail < a.length - head && tail < b.length - head && a.at(-1 - tail) === b.at(-1 - tail)) tail++;
  const x = a.slice(head, a.length - tail), y = b.slice(head, b.length - tail);
  const [keepX, keepY] = common(x.slice(0, MOST), y.slice(0, MOST));
  const side = (words, middle, keep) => merge([
    ...words.slice(0, head).map((w) => [true, w]),
    ...middle.map((w, i) => [keep.has(i), w]),
    ...words.slice(words.length - tail).map((w) => [true, w]),
  ]);
  return [side(a, x, keepX), side(b, y, keepY)];
}

function common(x, y) {
  const width = y.length + 1, table = new Uint16Array((x.length + 1) * width);
  for (let i = x.length - 1; i >= 0; i--)
    for (let j = y.length - 1; j >= 0; j--)
      table[i * width + j] = x[i] === y[j] ? table[(i + 1) * width + j + 1] + 1 : Math.max(table[(i + 1) * width + j], table[i * width + j + 1]);
  const keepX = new Set(), keepY = new Set();
  for (let i = 0, j = 0; i < x.length && j < y.length;) {
    if (x[i] === y[j]) { keepX.add(i++); keepY.add(j++); }
    else if (table[(i + 1) * width + j] >= table[i * width + j + 1]) i++; else j++;
  }
  return [keepX, keepY];
}

function merge(parts) {
  const out = [];
  for (const [same, text] of parts) {
    if (out.length && out.at(-1)[0] === same) out.at(-1)[1] += text; else out.push([same, text]);
  }
  return out;
}
