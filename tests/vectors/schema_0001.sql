-- A store as the first schema wrote it, in words that SQLite and PostgreSQL share: two live sandboxes of two owners, one
-- that has ended, their history, two keys (one revoked), and what the deployment remembered.
CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL, CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num));
INSERT INTO alembic_version VALUES ('0001');
CREATE TABLE sandboxes (
    id VARCHAR(64) NOT NULL, owner VARCHAR(64) NOT NULL, backend VARCHAR(64) NOT NULL, template_id TEXT NOT NULL,
    alias TEXT NOT NULL, state VARCHAR(16) NOT NULL, revision INTEGER NOT NULL, created_at BIGINT NOT NULL,
    started_at BIGINT, end_at BIGINT, ended_at BIGINT, timeout BIGINT NOT NULL, pause_on_timeout BOOLEAN NOT NULL,
    pause_memory BOOLEAN NOT NULL, auto_resume BOOLEAN NOT NULL, metadata JSON NOT NULL, envs JSON NOT NULL,
    resources JSON NOT NULL, allow_internet_access BOOLEAN NOT NULL, network JSON, secure BOOLEAN NOT NULL,
    token_version INTEGER NOT NULL, handle JSON NOT NULL, PRIMARY KEY (id)
);
CREATE INDEX sandboxes_by_state ON sandboxes (state);
CREATE INDEX sandboxes_by_end ON sandboxes (ended_at);
CREATE TABLE transitions (
    sandbox_id VARCHAR(64) NOT NULL, revision INTEGER NOT NULL, at BIGINT NOT NULL, from_state VARCHAR(16),
    to_state VARCHAR(16) NOT NULL, note TEXT NOT NULL, PRIMARY KEY (sandbox_id, revision),
    FOREIGN KEY(sandbox_id) REFERENCES sandboxes (id) ON DELETE CASCADE
);
CREATE TABLE api_keys (
    id VARCHAR(16) NOT NULL, digest VARCHAR(64) NOT NULL, prefix VARCHAR(16) NOT NULL, name TEXT NOT NULL,
    owner VARCHAR(64) NOT NULL, created_at BIGINT NOT NULL, revoked_at BIGINT, PRIMARY KEY (id), UNIQUE (digest)
);
CREATE TABLE meta (name VARCHAR(64) NOT NULL, value TEXT NOT NULL, PRIMARY KEY (name));
INSERT INTO sandboxes VALUES (
    'iaaaaaaaaaaaaaaaaaaaa', 'default', 'local', 'base', '', 'running', 1, 1790000000000000, 1790000001000000,
    4900000000000000, NULL, 300000000, FALSE, TRUE, FALSE, '{"a": "ä"}', '{"X": "1"}',
    '{"cpu_count": 2, "memory_mb": 512, "disk_size_mb": 1024}', TRUE, NULL, TRUE, 1, '{"id": "iaaaaaaaaaaaaaaaaaaaa"}'
);
INSERT INTO sandboxes VALUES (
    'ibbbbbbbbbbbbbbbbbbbb', 'lab', 'local', 'base', '', 'running', 1, 1790000000000000, 1790000001000000,
    4900000000000000, NULL, 300000000, TRUE, TRUE, TRUE, '{}', '{}',
    '{"cpu_count": 2, "memory_mb": 512, "disk_size_mb": 1024}', FALSE,
    '{"allow_out": ["a"], "deny_out": [], "allow_public_traffic": null, "mask_request_host": ""}', FALSE, 1,
    '{"id": "ibbbbbbbbbbbbbbbbbbbb"}'
);
INSERT INTO sandboxes VALUES (
    'icccccccccccccccccccc', 'default', 'local', 'base', '', 'killed', 3, 1790000000000000, 1790000001000000,
    1790000300000000, 4890000000000000, 300000000, FALSE, TRUE, FALSE, '{}', '{}',
    '{"cpu_count": 2, "memory_mb": 512, "disk_size_mb": 1024}', TRUE, NULL, FALSE, 1, '{"id": "icccccccccccccccccccc"}'
);
INSERT INTO transitions VALUES ('iaaaaaaaaaaaaaaaaaaaa', 0, 1790000000000000, NULL, 'creating', 'create');
INSERT INTO transitions VALUES ('iaaaaaaaaaaaaaaaaaaaa', 1, 1790000001000000, 'creating', 'running', 'ready');
INSERT INTO api_keys VALUES (
    'k1', '1f82ce18f1ba6303fe1e0a7462a4c0ad4ad3a4c3d1d2dbf1f2a8d0f3f5a0a7b1', 'e2b_aaaaaa', 'first', 'default',
    1780000000000000, NULL
);
INSERT INTO api_keys VALUES (
    'k2', '2f82ce18f1ba6303fe1e0a7462a4c0ad4ad3a4c3d1d2dbf1f2a8d0f3f5a0a7b1', 'e2b_bbbbbb', 'old', 'gone',
    1780000000000001, 1785000000000000
);
INSERT INTO meta VALUES ('seed-fingerprint', 'x');
