"""The Faust application that folds the event topics into the index."""
