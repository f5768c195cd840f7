"""Raw text and conversations to packed rows: sources, chat templates, packing, streaming."""
