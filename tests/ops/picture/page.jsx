// Draws window.DASHBOARD with the data in window.SCENE. window.DRAWN is set when all panels are drawn:
// the titles of panels without data, and of those that failed with the reasons.
import "@fontsource/inter/400.css";
import "@fontsource/inter/500.css";
import { createTheme, dateTime, EventBusSrv, ThemeContext } from "@grafana/data";
import { ErrorBoundary, PanelChrome, PanelContextProvider } from "@grafana/ui";
import { createRoot } from "react-dom/client";
import { framesOf } from "./frames.js";
import { Panel } from "./panels.jsx";

// Grafana's grid: cells of 30 pixels with gaps of 8, in 24 columns.
const CELL = 30;
const GAP = 8;
const COLUMNS = 24;
const WIDTH = 1600;
const theme = createTheme({ colors: { mode: "dark" } });
const failed = {};

function place({ x, y, w, h }) {
  const column = (WIDTH - GAP * (COLUMNS + 1)) / COLUMNS;
  return {
    left: GAP + x * (column + GAP),
    top: GAP + y * (CELL + GAP),
    width: w * (column + GAP) - GAP,
    height: h * (CELL + GAP) - GAP,
  };
}

function Placed({ panel, frames, timeRange }) {
  const at = place(panel.gridPos);
  if (panel.type === "row") {
    return (
      <div className="row" style={at}>
        ⌄ &nbsp;{panel.title}
      </div>
    );
  }
  return (
    <div className="panel" style={at}>
      <PanelChrome title={panel.title} width={at.width} height={at.height}>
        {(width, height) => (
          <ErrorBoundary>
            {({ error }) => {
              if (error) {
                failed[panel.title] = String(error);
                return <pre>{String(error)}</pre>;
              }
              return <Panel {...{ panel, frames, width, height, timeRange, theme }} />;
            }}
          </ErrorBoundary>
        )}
      </PanelChrome>
    </div>
  );
}

async function main() {
  await Promise.all(["400 12px Inter", "500 14px Inter"].map((font) => document.fonts.load(font)));
  const { DASHBOARD: dashboard, SCENE: scene } = window;
  const timeRange = {
    from: dateTime(scene.from),
    to: dateTime(scene.to),
    raw: { from: "now-5m", to: "now" },
  };
  const frames = {};
  for (const panel of dashboard.panels.filter((it) => it.type !== "row")) {
    try {
      frames[panel.id] = await framesOf(panel, scene.results[panel.id], theme);
    } catch (error) {
      failed[panel.title] = String(error);
    }
  }
  const drawn = dashboard.panels.filter((it) => it.type === "row" || frames[it.id]);
  const end = Math.max(...drawn.map((it) => it.gridPos.y + it.gridPos.h));
  const context = { eventsScope: "picture", eventBus: new EventBusSrv() };
  createRoot(document.getElementById("page")).render(
    <ThemeContext.Provider value={theme}>
      <PanelContextProvider value={context}>
        <div className="grid" style={{ width: WIDTH, height: end * (CELL + GAP) + GAP }}>
          {drawn.map((panel) => (
            <Placed key={panel.id} {...{ panel, frames: frames[panel.id], timeRange }} />
          ))}
        </div>
      </PanelContextProvider>
    </ThemeContext.Provider>,
  );
  setTimeout(() => {
    const titles = (selector) =>
      [...document.querySelectorAll(selector)].map(
        (it) => it.closest(".panel").querySelector("h2, h6")?.textContent,
      );
    window.DRAWN = { failed, empty: titles(".panel .empty") };
  }, 1500);
}

main().catch((error) => {
  window.DRAWN = { failed: { page: String(error.stack) }, empty: [] };
});
