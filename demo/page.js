() => {
  // Ctrl+Enter works in every text, as on other pages. Shift+Enter is Gradio's own.
  addEventListener("keydown", ({ key, ctrlKey, metaKey, target }) => {
    if (key !== "Enter" || !(ctrlKey || metaKey) || target.tagName !== "TEXTAREA") return;
    document.querySelector(target.closest("#own") ? "#score" : "#translate").click();
  });

  // A word or token under the pointer dims all words and tokens that are not linked to it.
  addEventListener("pointerover", ({ target }) => {
    const pointed = target.closest?.(".links [data-word]");
    for (const token of document.querySelectorAll(".links [data-word]"))
      token.classList.toggle("dim", !!pointed && token.dataset.word !== pointed.dataset.word);
  });

  // Screen readers announce results.
  for (const id of ["translations", "scores"]) document.getElementById(id).ariaLive = "polite";

  // The chosen theme is kept for the next visit. Gradio reads the theme from the address.
  const show = (theme) => {
    document.body.classList.toggle("dark", theme === "dark");
    const address = new URL(location);
    address.searchParams.set("__theme", theme);
    history.replaceState(null, "", address);
  };
  const kept = () => {
    try {
      return localStorage.getItem("theme");
    } catch {
      return null; // browsers may refuse storage to pages inside other pages
    }
  };
  if (kept()) show(kept());
  document.getElementById("theme").addEventListener("click", () => {
    const theme = document.body.classList.contains("dark") ? "light" : "dark";
    show(theme);
    try {
      localStorage.setItem("theme", theme);
    } catch {
      // without storage, the theme is kept until the page is closed
    }
  });
};
