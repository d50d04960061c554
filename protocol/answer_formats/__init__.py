"""How models write reasoning and calls of tools: markers, parsers and grammars by model family. Pure."""
