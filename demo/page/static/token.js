// The token of this start of the demo. The address that the terminal shows has it; the tab keeps it, for this port alone.

const TOKEN = /^#token=(.+)$/;

/** Take the token out of the address. */
export function takeToken() {
  const [, token] = TOKEN.exec(location.hash) ?? [];
  if (token) {
    sessionStorage.setItem("token", token);
    history.replaceState(null, "", location.pathname);
  }
  addEventListener("hashchange", () => TOKEN.test(location.hash) && location.reload());
}

export const kept = () => sessionStorage.getItem("token") ?? "";

/** The header that the server asks for. */
export const bearer = (token) => ({ Authorization: `Bearer ${token}` });
