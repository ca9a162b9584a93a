"""An app state taken apart for a save: its skeleton, its leaves, and which of them are captured when."""
