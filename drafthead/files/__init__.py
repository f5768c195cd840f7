"""Files: atomic writing, manifests and locks in folders, and the Hugging Face Hub."""
