// Fetches a component's module once from the console's own server, so that its code is not sent again with every refresh.
const module = import(new URL("drover/assets/MODULE", document.baseURI).href);

export default function (component) {
  const { parentElement } = component;
  module.then(
    (found) => found.render(component),
    (error) => {
      parentElement.textContent = `this part of the page could not be loaded (${error}); reload the page`;
    },
  );
  return () => module.then((found) => found.unmount(parentElement), () => undefined);
}
