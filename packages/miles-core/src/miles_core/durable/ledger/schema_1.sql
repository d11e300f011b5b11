CREATE TABLE starts (
    start INTEGER PRIMARY KEY,
    from_step INTEGER,              -- the committed step it goes on from, NULL for a fresh run
    at REAL NOT NULL,               -- seconds since 1970, as every `at` here
    is_in_place INTEGER NOT NULL,   -- the trainer went back, the process stayed
    returned INTEGER NOT NULL,      -- groups of dropped steps that went back to the buffer
    max_staleness INTEGER,
    credits INTEGER,
    retries INTEGER NOT NULL,
    info TEXT NOT NULL              -- JSON
);
CREATE TABLE segments (
    segment INTEGER PRIMARY KEY,
    file TEXT NOT NULL UNIQUE       -- in trajectories/
);
CREATE TABLE groups (
    number INTEGER PRIMARY KEY,     -- order of issue, from 0
    group_id TEXT NOT NULL UNIQUE,
    prompt_id TEXT NOT NULL,
    fate TEXT NOT NULL,
    reason TEXT NOT NULL,
    issued_start INTEGER NOT NULL REFERENCES starts,
    issued_at REAL NOT NULL,
    issued_version INTEGER NOT NULL,
    attempt INTEGER NOT NULL,       -- first one of the present issue
    drawn INTEGER,                  -- prompts drawn from the stream up to its issue
    retry_of TEXT,
    is_retry_due INTEGER NOT NULL,  -- its prompt is to run again and was not issued again yet
    finished_at REAL,
    segment INTEGER REFERENCES segments,
    offset INTEGER,
    oldest_version INTEGER,         -- as recorded, labels of dead branches included
    newest_version INTEGER
);
CREATE INDEX groups_prompt ON groups (prompt_id);
CREATE INDEX groups_open ON groups (number) WHERE fate IN ('in_flight', 'buffered');
CREATE INDEX groups_retry ON groups (number) WHERE is_retry_due;
CREATE TABLE changes (
    change INTEGER PRIMARY KEY,
    number INTEGER NOT NULL REFERENCES groups,
    what TEXT NOT NULL,             -- issued, reissued, returned, or a fate
    reason TEXT NOT NULL,
    version INTEGER NOT NULL,
    start INTEGER NOT NULL REFERENCES starts,
    at REAL NOT NULL
);
CREATE INDEX changes_group ON changes (number);
CREATE TABLE episodes (
    number INTEGER NOT NULL REFERENCES groups,
    episode INTEGER NOT NULL,
    episode_id TEXT NOT NULL,
    outcome TEXT NOT NULL,
    reward REAL,
    error TEXT,
    attempt INTEGER NOT NULL,
    seconds REAL NOT NULL,
    finished_at REAL,
    trajectories INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    loss_tokens INTEGER NOT NULL,
    oldest_version INTEGER,
    newest_version INTEGER,
    is_masked INTEGER NOT NULL DEFAULT 0,   -- too old: counted for the baseline, not trained
    PRIMARY KEY (number, episode),
    CHECK ((reward IS NULL) = (outcome NOT IN ('graded', 'policy_limit')))
) WITHOUT ROWID;
CREATE TABLE attempts (
    number INTEGER NOT NULL REFERENCES groups,
    episode INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    outcome TEXT NOT NULL,
    error TEXT,
    seconds REAL NOT NULL,
    finished_at REAL NOT NULL,
    PRIMARY KEY (number, episode, attempt)
) WITHOUT ROWID;
CREATE TABLE steps (
    step INTEGER PRIMARY KEY,
    version INTEGER NOT NULL,       -- of the weights that it made
    start INTEGER NOT NULL REFERENCES starts,
    at REAL NOT NULL,
    committed_at REAL,
    checkpoint TEXT,                -- where it is the newest step of one
    dropped_start INTEGER REFERENCES starts     -- the start that went back behind it
);
CREATE UNIQUE INDEX steps_live ON steps (version) WHERE dropped_start IS NULL;
CREATE TABLE step_groups (
    step INTEGER NOT NULL REFERENCES steps,
    number INTEGER NOT NULL REFERENCES groups,
    is_live INTEGER NOT NULL,
    PRIMARY KEY (step, number)
) WITHOUT ROWID;
CREATE UNIQUE INDEX trained_once ON step_groups (number) WHERE is_live;
