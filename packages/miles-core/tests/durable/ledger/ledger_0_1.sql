PRAGMA application_id = 1296844103;
PRAGMA user_version = 2;
BEGIN TRANSACTION;
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
INSERT INTO "attempts" VALUES(0,0,0,'infra_abort','OSError: the engine is gone',1.0,999990.0);
CREATE TABLE changes (
    change INTEGER PRIMARY KEY,
    number INTEGER NOT NULL REFERENCES groups,
    what TEXT NOT NULL,             -- issued, reissued, returned, or a fate
    reason TEXT NOT NULL,
    version INTEGER NOT NULL,
    start INTEGER NOT NULL REFERENCES starts,
    at REAL NOT NULL
);
INSERT INTO "changes" VALUES(1,0,'issued','',0,0,1772600002.0);
INSERT INTO "changes" VALUES(2,1,'issued','',0,0,1772600004.0);
INSERT INTO "changes" VALUES(3,2,'issued','',0,0,1772600006.0);
INSERT INTO "changes" VALUES(4,3,'issued','',0,0,1772600008.0);
INSERT INTO "changes" VALUES(5,0,'buffered','',0,0,1772600010.0);
INSERT INTO "changes" VALUES(6,0,'trained','',1,0,1772600012.0);
INSERT INTO "changes" VALUES(7,1,'stale','stale',1,0,1772600016.0);
INSERT INTO "changes" VALUES(8,4,'issued','',1,0,1772600018.0);
INSERT INTO "changes" VALUES(9,2,'buffered','',1,0,1772600020.0);
INSERT INTO "changes" VALUES(10,2,'trained','',2,0,1772600022.0);
INSERT INTO "changes" VALUES(11,2,'returned','back to step 1',1,1,1772600025.0);
INSERT INTO "changes" VALUES(12,3,'reissued','',1,1,1772600026.0);
INSERT INTO "changes" VALUES(13,4,'reissued','',1,1,1772600027.0);
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
INSERT INTO "episodes" VALUES(0,0,'g000000/0','graded',1.0,NULL,1,2.0,1000000.0,1,10,6,0,0,0);
INSERT INTO "episodes" VALUES(0,1,'g000000/1','infra_abort',NULL,'ConnectionError: the sandbox is gone',0,2.0,1000000.0,0,0,0,NULL,NULL,0);
INSERT INTO "episodes" VALUES(1,0,'g000001/0','graded',0.0,NULL,0,2.0,1000000.0,1,10,6,0,0,0);
INSERT INTO "episodes" VALUES(1,1,'g000001/1','graded',1.0,NULL,0,2.0,1000000.0,1,10,6,0,0,0);
INSERT INTO "episodes" VALUES(2,0,'g000002/0','graded',0.0,NULL,0,2.0,1000000.0,1,10,6,0,0,0);
INSERT INTO "episodes" VALUES(2,1,'g000002/1','graded',1.0,NULL,0,2.0,1000000.0,1,10,6,0,0,0);
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
INSERT INTO "evaluations" VALUES(1,'eval',1,1,0.5,'',2.0,'{"eval/score": 0.5}',0,1772600013.0);
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
INSERT INTO "groups" VALUES(0,'g000000','p-g000000','trained','',0,1772600001.0,0,0,4,NULL,0,1772600009.0,1,0,0,0);
INSERT INTO "groups" VALUES(1,'g000001','p-g000001','stale','stale',0,1772600003.0,0,0,4,NULL,0,1772600015.0,1,900,0,0);
INSERT INTO "groups" VALUES(2,'g000002','p-g000002','buffered','',0,1772600005.0,0,0,4,NULL,0,1772600019.0,1,1800,0,0);
INSERT INTO "groups" VALUES(3,'g000003','p-g000003','in_flight','',1,1772600007.0,1,2,4,NULL,0,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "groups" VALUES(4,'g000004','p-g000004','in_flight','',1,1772600017.0,1,2,4,'g000001',0,NULL,NULL,NULL,NULL,NULL);
CREATE TABLE happenings (
    happening INTEGER PRIMARY KEY,
    kind TEXT NOT NULL,             -- engine, worker, trainer, session, alarm, …
    subject TEXT NOT NULL,
    text TEXT NOT NULL,
    version INTEGER,
    start INTEGER NOT NULL REFERENCES starts,
    at REAL NOT NULL
);
INSERT INTO "happenings" VALUES(1,'engine','rollout-0','died: exit status -9',2,0,1772600023.0);
INSERT INTO "happenings" VALUES(2,'trainer','all ranks','restarted: rank 0 died',NULL,1,1772600028.0);
CREATE TABLE segments (
    segment INTEGER PRIMARY KEY,
    file TEXT NOT NULL UNIQUE       -- in trajectories/
);
INSERT INTO "segments" VALUES(1,'worker-0.000.spool');
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
INSERT INTO "starts" VALUES(0,NULL,1772600000.0,0,0,2,8,1,'{"python": "3.12"}');
INSERT INTO "starts" VALUES(1,1,1772600024.0,0,1,2,8,1,'{}');
CREATE TABLE step_groups (
    step INTEGER NOT NULL REFERENCES steps,
    number INTEGER NOT NULL REFERENCES groups,
    is_live INTEGER NOT NULL,
    PRIMARY KEY (step, number)
) WITHOUT ROWID;
INSERT INTO "step_groups" VALUES(1,0,1);
INSERT INTO "step_groups" VALUES(2,2,0);
CREATE TABLE steps (
    step INTEGER PRIMARY KEY,
    version INTEGER NOT NULL,       -- of the weights that it made
    start INTEGER NOT NULL REFERENCES starts,
    at REAL NOT NULL,
    committed_at REAL,
    checkpoint TEXT,                -- where it is the newest step of one
    dropped_start INTEGER REFERENCES starts     -- the start that went back behind it
, facts TEXT NOT NULL DEFAULT '{}');
INSERT INTO "steps" VALUES(1,1,0,1772600011.0,1772600014.0,'step-000001',NULL,'{}');
INSERT INTO "steps" VALUES(2,2,0,1772600021.0,NULL,NULL,1,'{}');
CREATE INDEX groups_prompt ON groups (prompt_id);
CREATE INDEX groups_open ON groups (number) WHERE fate IN ('in_flight', 'buffered');
CREATE INDEX groups_retry ON groups (number) WHERE is_retry_due;
CREATE INDEX changes_group ON changes (number);
CREATE UNIQUE INDEX steps_live ON steps (version) WHERE dropped_start IS NULL;
CREATE UNIQUE INDEX trained_once ON step_groups (number) WHERE is_live;
COMMIT;
