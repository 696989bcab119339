// The switch between light and dark. The choice is this browser's; without one, the system's setting applies.

const KEPT_AS = "gpushare-theme";

export function startTheme() {
  const chosen = kept();
  apply(chosen);
  for (const input of document.querySelectorAll("input[name=theme]")) {
    input.checked = input.value === chosen;
    input.addEventListener("change", () => {
      apply(input.value);
      keep(input.value);
    });
  }
}

function apply(name) {
  if (name === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
}

function kept() {
  try {
    const name = localStorage.getItem(KEPT_AS);
    return name === "light" || name === "dark" ? name : "system";
  } catch {
    return "system"; // storage that is switched off: the choice lasts as long as the page
  }
}

function keep(name) {
  try {
    localStorage.setItem(KEPT_AS, name);
  } catch {
    // as above
  }
}
