"""The live page of the walkthrough: what the terminal tells, and the chain itself, in a browser of this host.

Optional: to do without, delete this folder and the line ``player`` of pyproject.toml.

| module | its noun |
|---|---|
| `player` | the walkthrough's player: it wires all others |
| `probe`, `readings` | what is asked of each part, and the answers |
| `state`, `drift`, `journeys` | what the answers mean for the page |
| `hub`, `poller` | one document for all who look, and the thread that keeps it fresh |
| `lesson`, `actions`, `client` | the quiz around the story; the buttons that break the chain; a client of the service |
| `app`, `security` | the HTTP side |

`static/` has the page itself: no build step, and nothing from other hosts.
"""
