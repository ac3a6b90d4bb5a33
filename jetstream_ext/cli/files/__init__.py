"""Files of rows: how `ingest` reads them and finds what is stored of them, and how `export` writes them."""
