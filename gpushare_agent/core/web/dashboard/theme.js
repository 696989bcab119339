// Switches that this browser remembers, the one between light and dark first. Without a choice the system's setting applies.

/** The radio buttons `name`. `apply` is called with the chosen value, now and after each change. */
export function startChoice(name, apply) {
  const inputs = [...document.querySelectorAll(`input[name=${name}]`)];
  const known = kept(`gpushare-${name}`);
  for (const input of inputs) {
    if (input.value === known) input.checked = true;
    input.addEventListener("change", () => {
      apply(input.value);
      keep(`gpushare-${name}`, input.value);
    });
  }
  apply(inputs.find((input) => input.checked).value);
}

export function startTheme() {
  startChoice("theme", (name) => {
    if (name === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
  });
}

function kept(key) {
  try {
    return localStorage.getItem(key);
  } catch {
    return null; // storage that is switched off: the choice lasts as long as the page
  }
}

function keep(key, value) {
  try {
    localStorage.setItem(key, value);
  } catch {
    // as above
  }
}
