// The page: sign-in, the frame with the views' links, and the view of the present address (what stands behind #/).
//
// A view is a component in views/NAME.js. It gets { picture, rest }: the live picture (see live.js) and the decoded parts of the
// address behind the view's own name. It begins with an <h2 tabindex="-1">, which gets the focus when the view is opened.

import { announce, Button, drawing, Empty, html, Icon, render, Said, useEffect, useRef, useSubmit } from "./ui.js";
import { connect, useLive } from "./live.js";
import { signIn, signOut } from "./session.js";
import { Overview } from "./views/overview.js";
import { Model } from "./views/model.js";
import { Requests } from "./views/requests.js";
import { Chat } from "./views/chat.js";
import { Connect } from "./views/connect.js";
import { Keys } from "./views/keys.js";
import { Configuration } from "./views/configuration.js";

// The name in the address, the title, the view, and whether only administrators have it.
const VIEWS = [
  ["", "Overview", Overview],
  ["models", "Model", Model],
  ["requests", "Requests", Requests],
  ["chat", "Chat", Chat],
  ["connect", "Connect", Connect],
  ["keys", (picture) => picture.admin ? "Keys and usage" : "Usage", Keys],
  ["configuration", "Configuration", Configuration, true],
];
const titleOf = (view, picture) => typeof view[1] === "string" ? view[1] : view[1](picture);

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

// The view Chat names a new conversation in the address without an event, and that opens no other view.
const [useAddress, moved] = drawing();
const parts = () => location.hash.replace(/^#\/?/, "").split("/").map(decoded);
let opened = parts();
addEventListener("hashchange", () => { opened = parts(); moved(); });

function SignIn() {
  const { wrong, submit } = useSubmit(async ({ token }) => {
    await signIn(token.value);
    token.value = "";
    connect();
  });
  return html`<main class="sign-in"><form class="card" onSubmit=${submit}>
    <h2>Sign in</h2>
    <p>Give a token. <code>modelctl keys new NAME --http</code> makes one. With <code>--rights infer,status,admin</code> it may see and do everything.</p>
    <label for="token">Token</label>
    <input id="token" name="token" type="password" autocomplete="current-password" required spellcheck="false" autofocus />
    <${Button} kind="" type="submit">Sign in<//>
    <p class="error" role="alert">${wrong}</p>
  </form></main>`;
}

function Page({ picture }) {
  useAddress();
  const [name, ...rest] = opened;
  const main = useRef();
  const found = VIEWS.find((view) => view[0] === name);
  const title = found ? titleOf(found, picture) : "Not found";
  const first = useRef(true);
  const place = [name, rest[0]].join("/");
  useEffect(() => {
    document.title = name === "models" && rest[0] ? `${rest[0]} · modelctl` : name ? `${title} · modelctl` : "modelctl";
    // Not at the first view: a reload of the page leaves the focus at the document's beginning, as on every page.
    if (!first.current) {
      main.current.querySelector("h2")?.focus({ preventScroll: true });
      scrollTo(0, 0);
      announce(title);
    }
    first.current = false;
  }, [place]);
  return html`
    <nav aria-label="Views">${VIEWS.filter((view) => view[0] !== "models" && (!view[3] || picture.admin)).map((view) => html`
      <a key=${view[0]} href=${`#/${view[0]}`} aria-current=${name === view[0] ? "page" : undefined}>
        <${Icon} name=${view[0] || "overview"} /><span>${titleOf(view, picture)}</span></a>`)}
    </nav>
    <main id="main" ref=${main}>
      <${Said} trouble=${picture.trouble} />
      ${found ? html`<${found[2]} key=${found[0]} picture=${picture} rest=${rest} />`
        : html`<h2 tabindex="-1">Not found</h2><${Empty}>There is no view at this address. <a href="#/">To the overview</a><//>`}
    </main>`;
}

function App() {
  const { picture, connection } = useLive();
  const signedOut = connection.state === "signed out";
  const leave = () => signOut().catch((error) => announce(`Sign out: ${error.message}`));
  return html`
    ${!signedOut && html`<a class="skip" href="#main" onClick=${(event) => {
      event.preventDefault(); // the address names the view
      document.querySelector("main h2")?.focus();
    }}>Skip to the content</a>`}
    <header class="top"><div>
      <h1><a href="#/">modelctl</a></h1>
      <p class="connection" data-state=${connection.state}><span class="dot" aria-hidden="true" />${connection.text}</p>
      ${picture.auth === "keys" && html`<${Button} onClick=${leave}>Sign out<//>`}
    </div></header>
    ${signedOut ? html`<${SignIn} />` : picture.order || picture.trouble ? html`<${Page} picture=${picture} />`
      : html`<main><p class="none">Reading …</p></main>`}`;
}

render(html`<${App} />`, document.getElementById("app"));
connect();
