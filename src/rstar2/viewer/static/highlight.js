// Syntax colours for Python by a small tokenizer. Returns nodes.

import { h, visible } from "/static/dom.js";

const KEYWORDS = new Set("False None True and as assert async await break class continue def del elif else except finally for from global if import in is lambda nonlocal not or pass raise return try while with yield match case".split(" "));
const TOKEN = /(#[^\n]*)|([rbfuRBFU]{0,2}(?:"""[\s\S]*?(?:"""|$)|'''[\s\S]*?(?:'''|$)|"(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'?))|(\b\d[\d_]*(?:\.\d*)?(?:[eE][+-]?\d+)?j?\b|\b0[xXbBoO][\da-fA-F_]+\b)|([A-Za-z_]\w*)(\s*\()?/g;

export function python(code) {
  const out = [];
  let end = 0;
  for (const match of code.matchAll(TOKEN)) {
    if (match.index > end) out.push(visible(code.slice(end, match.index)));
    const [all, comment, string, digits, word, call] = match;
    if (comment) out.push(h("i.c", null, comment));
    else if (string) out.push(h("i.s", null, string));
    else if (digits) out.push(h("i.n", null, digits));
    else {
      out.push(KEYWORDS.has(word) ? h("i.k", null, word) : call ? h("i.f", null, word) : word);
      if (call) out.push(call);
    }
    end = match.index + all.length;
  }
  if (end < code.length) out.push(visible(code.slice(end)));
  return out;
}
