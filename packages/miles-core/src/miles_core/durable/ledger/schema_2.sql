ALTER TABLE steps ADD COLUMN facts TEXT NOT NULL DEFAULT '{}';      -- JSON: seconds, tokens, …
CREATE TABLE happenings (
    happening INTEGER PRIMARY KEY,
    kind TEXT NOT NULL,             -- engine, worker, trainer, session, alarm, …
    subject TEXT NOT NULL,
    text TEXT NOT NULL,
    version INTEGER,
    start INTEGER NOT NULL REFERENCES starts,
    at REAL NOT NULL
);
CREATE TABLE evaluations (
    evaluation INTEGER PRIMARY KEY,
    dataset TEXT NOT NULL,
    version INTEGER NOT NULL,       -- of the weights that were evaluated
    logged_version INTEGER NOT NULL,    -- that the trainer had when the result came: the lag is the difference
    score REAL,                     -- NULL for a skipped point
    reason TEXT NOT NULL,           -- why it was skipped
    seconds REAL NOT NULL,
    metrics TEXT NOT NULL,          -- JSON
    start INTEGER NOT NULL REFERENCES starts,
    at REAL NOT NULL
);
