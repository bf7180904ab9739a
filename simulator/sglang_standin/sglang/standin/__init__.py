"""The machinery of the stand-in. Real SGLang has no package of this name."""
