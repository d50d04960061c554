// Markdown as preact elements: html`<${Markdown} text=${answer} />`. marked's lexer reads the text. What it finds becomes
// elements one by one, and never HTML text, so nothing in an answer can become a script, a style or a request:
//   * HTML stands in the page as the text that it is.
//   * Only http, https and mailto become links, and a picture becomes a link to it. Any other address stays text.
//   * Depth and length are bounded, so no answer can stop the page.
// A text that grows is cheap: blocks that can no longer change are neither read nor drawn again.

import { Component, h, html } from "./vendor/preact-htm.js";
import { Lexer, Tokenizer } from "./vendor/marked.js";
import { Copy } from "./ui.js";

const DEEPEST = 20;
const LONGEST = 20_000; // characters of a paragraph. Reading some of them takes marked the square of their length
const MAY_CHANGE = 3; // tokens at the end that the rest of the text may change: a list, the blank lines, what follows
const GROUP = 40;
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', "#39": "'", nbsp: "\u00a0" };

class PlainTokenizer extends Tokenizer {
  depth = 0;
  html() {}
  tag() {}
  def() {}
  reflink() {}
  lheading() {} // while a list begins, the line before it must not become a heading
  blockquote(source) { return this.nested("blockquote", source); }
  list(source) { return this.nested("list", source); }
  nested(kind, source) {
    if (this.depth >= DEEPEST) return undefined;
    this.depth += 1;
    const token = super[kind](source);
    this.depth -= 1;
    return token;
  }
}

class BoundedLexer extends Lexer {
  inlineTokens(source, tokens = []) {
    if (source.length <= LONGEST) return super.inlineTokens(source, tokens);
    tokens.push({ type: "text", raw: source, text: source });
    return tokens;
  }
}

function read(text) {
  try {
    return new BoundedLexer({ gfm: true, tokenizer: new PlainTokenizer() }).lex(text);
  } catch {
    return [{ type: "text", raw: text, text }]; // too deep for the stack
  }
}

// The address of a link, or null if it must not become one. The URL is the one that the browser would use, so line breaks
// and control characters hide no scheme.
function address(href) {
  try {
    const url = new URL(href);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

const inline = (tokens, depth = 0, linked = false) => tokens.map((token) => span(token, depth, linked));
const blocks = (tokens) => tokens.map((token) => block(token, 1));

function span(token, depth, linked) {
  if (depth > DEEPEST) return token.raw;
  switch (token.type) {
    case "strong": case "em": case "del": return h(token.type, null, inline(token.tokens, depth + 1, linked));
    case "codespan": return h("code", null, token.text);
    case "br": return h("br");
    case "checkbox": return token.checked ? "☑ " : "☐ ";
    case "link": case "image": {
      const href = address(token.href);
      if (linked || !href) return token.raw;
      const text = token.type === "link" ? inline(token.tokens, depth + 1, true) : token.text || token.href;
      return html`<a href=${href} title=${href} target="_blank" rel="noopener noreferrer">${text}</a>`;
    }
    default:
      if (token.tokens) return inline(token.tokens, depth + 1, linked);
      return (token.text ?? token.raw).replace(/&(amp|lt|gt|quot|#39|nbsp);/g, (_, name) => ENTITIES[name]);
  }
}

// top: the depth of the answer's first heading. In the page it is an h4, below the conversation's name.
function block(token, top) {
  switch (token.type) {
    case "space": return null;
    case "hr": return h("hr");
    case "heading": return h(`h${Math.min(6, Math.max(4, token.depth + 4 - top))}`, null, inline(token.tokens));
    case "paragraph": return h("p", null, inline(token.tokens));
    case "blockquote": return h("blockquote", null, blocks(token.tokens));
    case "list": {
      const items = token.items.map((item) => h("li", null, blocks(item.tokens)));
      return token.ordered ? h("ol", { start: token.start }, items) : h("ul", null, items);
    }
    case "code": {
      const language = (token.lang || "").split(/\s/)[0].slice(0, 40);
      return html`<div class="code"><p><span>${language || "text"}</span> <${Copy} text=${token.text} /></p>
        <pre tabindex="0"><code>${token.text}</code></pre></div>`;
    }
    case "table": {
      const cells = (row, tag) => h("tr", null, row.map((cell) => h(tag, { class: cell.align }, inline(cell.tokens))));
      return html`<div class="scroll" tabindex="0"><table><thead>${cells(token.header, "th")}</thead>
        <tbody>${token.rows.map((row) => cells(row, "td"))}</tbody></table></div>`;
    }
    default: return span(token, 0, false);
  }
}

class Block extends Component {
  shouldComponentUpdate({ token, top }) { return token.raw !== this.props.token.raw || top !== this.props.top; }
  render({ token, top }) { return block(token, top); }
}

// A number of blocks. The browser lays out again only those that change, and draws only those that are in sight.
class Blocks extends Component {
  shouldComponentUpdate({ done, open }) { return open.length > 0 || this.props.open.length > 0 || done !== this.props.done; }
  render({ done, open }) { return h("div", null, done, open); }
}

export class Markdown extends Component {
  groups = [[]]; // of the blocks that are done
  read = ""; // the text of these blocks
  top = null; // the depth of the first heading in it
  shouldComponentUpdate({ text }) { return text !== this.props.text; }
  render({ text }) {
    const whole = text.replace(/\r\n?/g, "\n");
    if (!whole.startsWith(this.read)) [this.groups, this.read, this.top] = [[[]], "", null];
    const tokens = read(whole.slice(this.read.length));
    const top = this.top ?? tokens.find((token) => token.type === "heading")?.depth;
    // marked replaces some characters. A block that is not the text word for word stays open, and so do those after it.
    while (tokens.length > MAY_CHANGE && whole.startsWith(tokens[0].raw, this.read.length)) {
      const token = tokens.shift();
      this.groups.at(-1).push(h(Block, { key: this.read.length, token, top }));
      this.read += token.raw;
      if (token.type === "heading") this.top ??= token.depth;
      if (this.groups.at(-1).length === GROUP) this.groups.push([]);
    }
    let at = this.read.length;
    const open = tokens.map((token) => {
      const element = h(Block, { key: at, token, top });
      at += token.raw.length;
      return element;
    });
    const last = this.groups.length - 1;
    return html`<div class="markdown">${this.groups.map((done, i) => h(Blocks, { key: i, done, open: i === last ? open : [] }))}</div>`;
  }
}
