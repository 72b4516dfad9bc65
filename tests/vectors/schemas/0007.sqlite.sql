BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL,
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0007');
CREATE TABLE api_keys (
	id VARCHAR(16) NOT NULL,
	digest VARCHAR(64) NOT NULL,
	prefix VARCHAR(16) NOT NULL,
	name TEXT NOT NULL,
	owner VARCHAR(64) NOT NULL,
	created_at BIGINT NOT NULL,
	revoked_at BIGINT, last_used_at BIGINT,
	PRIMARY KEY (id),
	UNIQUE (digest)
);
INSERT INTO "api_keys" VALUES('k1','8b9a845c0344468dfb225b08f15c22dc85a7cc018c315035f7766528d8b7103a','e2b_012345','first','default',1790000000000000,NULL,1790000000000005);
INSERT INTO "api_keys" VALUES('k2','2f82ce18f1ba6303fe1e0a7462a4c0ad4ad3a4c3d1d2dbf1f2a8d0f3f5a0a7b1','e2b_bbbbbb','old','gone',1790000000000000,1790000000000001,NULL);
CREATE TABLE audit (
	id INTEGER NOT NULL,
	at BIGINT NOT NULL,
	team VARCHAR(64) NOT NULL,
	key_id VARCHAR(16) NOT NULL,
	key_name TEXT NOT NULL,
	action VARCHAR(32) NOT NULL,
	subject VARCHAR(64) NOT NULL,
	outcome VARCHAR(32) NOT NULL,
	request_id VARCHAR(128) NOT NULL,
	PRIMARY KEY (id)
);
INSERT INTO "audit" VALUES(1,4900000000000000,'default','k1','first','sandbox.create','iaaaaaaaaaaaaaaaaaaaa','OK','r-1');
INSERT INTO "audit" VALUES(2,4900000000000001,'lab','k9','ä','sandbox.kill','ibbbbbbbbbbbbbbbbbbbb','NOT_FOUND','r-2');
CREATE TABLE command_logs (
	sandbox_id VARCHAR(64) NOT NULL,
	number BIGINT NOT NULL,
	first_at BIGINT NOT NULL,
	last_at BIGINT NOT NULL,
	journal BIGINT NOT NULL,
	last_line BIGINT NOT NULL,
	size INTEGER NOT NULL,
	lines BLOB NOT NULL,
	PRIMARY KEY (sandbox_id, number),
	FOREIGN KEY(sandbox_id) REFERENCES sandboxes (id) ON DELETE CASCADE
);
INSERT INTO "command_logs" VALUES('iaaaaaaaaaaaaaaaaaaaa',1,1790000000000000,4900000000000000,9,2,40,X'78018B8E3634B73440063A0AE63A0A4AE5A9494A40AAB82425BFB404C4CA2C512F56282DB052882935304835518AD55140D76A88AE35B5A808A435A9B444A13827BF5C29361600ECCB1C81');
CREATE TABLE cores (
	id VARCHAR(32) NOT NULL,
	address TEXT NOT NULL,
	host TEXT NOT NULL,
	boot VARCHAR(32) NOT NULL,
	lease_end BIGINT NOT NULL,
	PRIMARY KEY (id)
);
INSERT INTO "cores" VALUES('n0123456789ab','10.0.0.1:7070','one','b1',1790000000000000);
CREATE TABLE create_rates (
	team VARCHAR(64) NOT NULL,
	tokens DOUBLE NOT NULL,
	at BIGINT NOT NULL,
	PRIMARY KEY (team)
);
INSERT INTO "create_rates" VALUES('lab',12.5,1790000000000000);
CREATE TABLE measurements (
	sandbox_id VARCHAR(64) NOT NULL,
	at BIGINT NOT NULL,
	samples BLOB NOT NULL,
	PRIMARY KEY (sandbox_id, at),
	FOREIGN KEY(sandbox_id) REFERENCES sandboxes (id) ON DELETE CASCADE
);
INSERT INTO "measurements" VALUES('iaaaaaaaaaaaaaaaaaaaa',1790000000000000,X'00E025DAFE5B0600020000000000000000000000000000200000000000000010000000000000100000000000000020000000000000000040000000000067B9DDFE5B060002000000000000000000294000000020000000000000001000000000000010000000000000002000000000000000004000000000');
INSERT INTO "measurements" VALUES('iaaaaaaaaaaaaaaaaaaaa',1790000120000000,X'00EE4CE1FE5B0600020000000000000000003940000000200000000000000010000000000000100000000000000020000000000000000040000000000075E0E4FE5B0600020000000000000000C0424000000020000000000000001000000000000010000000000000002000000000000000004000000000');
CREATE TABLE meta (
	name VARCHAR(64) NOT NULL,
	value TEXT NOT NULL,
	PRIMARY KEY (name)
);
INSERT INTO "meta" VALUES('seed-fingerprint','aa1a209f5db71f2bd276f29350335aa6');
CREATE TABLE sandboxes (
	id VARCHAR(64) NOT NULL,
	owner VARCHAR(64) NOT NULL,
	backend VARCHAR(64) NOT NULL,
	template_id TEXT NOT NULL,
	alias TEXT NOT NULL,
	state VARCHAR(16) NOT NULL,
	revision INTEGER NOT NULL,
	created_at BIGINT NOT NULL,
	started_at BIGINT,
	end_at BIGINT,
	ended_at BIGINT,
	timeout BIGINT NOT NULL,
	pause_on_timeout BOOLEAN NOT NULL,
	pause_memory BOOLEAN NOT NULL,
	auto_resume BOOLEAN NOT NULL,
	metadata JSON NOT NULL,
	envs JSON NOT NULL,
	resources JSON NOT NULL,
	allow_internet_access BOOLEAN NOT NULL,
	network JSON,
	secure BOOLEAN NOT NULL,
	token_version INTEGER NOT NULL,
	handle JSON NOT NULL, pause_mode VARCHAR(16), agent_unresponsive BOOLEAN DEFAULT 0 NOT NULL, idempotency_key VARCHAR(255), request_digest VARCHAR(64), setup JSON, egress_pending BOOLEAN DEFAULT 0 NOT NULL, core VARCHAR(32) DEFAULT '' NOT NULL,
	PRIMARY KEY (id)
);
INSERT INTO "sandboxes" VALUES('iaaaaaaaaaaaaaaaaaaaa','default','local','base','','running',1,1790000000000000,1790000001000000,4900000000000000,NULL,300000000,0,1,0,'{"a": "\u00e4", "nul": "\u0000", "quote": "it''s \"so\"; -- \\"}','{"X": "1"}','{"cpu_count": 2, "memory_mb": 512, "disk_size_mb": 1024}',1,NULL,1,1,'{"id": "iaaaaaaaaaaaaaaaaaaaa"}',NULL,0,'retry-1','cfcba7f18247ef1fbd9ea7f14ceb3d9cc70b4f530cdaa3c606eadc3f4d4bac97','{"template": "base", "default_user": "root", "workdir": "/srv", "start_command": "serve", "ready_command": ""}',0,'n0123456789ab');
INSERT INTO "sandboxes" VALUES('ibbbbbbbbbbbbbbbbbbbb','lab','local','base','','running',1,1790000000000000,1790000001000000,4900000000000000,NULL,300000000,1,1,1,'{}','{}','{"cpu_count": 2, "memory_mb": 512, "disk_size_mb": 1024}',0,'{"allow_out": ["a"], "deny_out": [], "allow_public_traffic": null, "mask_request_host": ""}',0,1,'{"id": "ibbbbbbbbbbbbbbbbbbbb"}',NULL,0,NULL,NULL,NULL,0,'n0123456789ab');
INSERT INTO "sandboxes" VALUES('icccccccccccccccccccc','default','local','base','','killed',3,1790000000000000,1790000001000000,1790000300000000,4900000000000000,300000000,0,1,0,'{}','{}','{"cpu_count": 2, "memory_mb": 512, "disk_size_mb": 1024}',1,NULL,0,1,'{"id": "icccccccccccccccccccc"}',NULL,0,NULL,NULL,NULL,0,'n0123456789ab');
INSERT INTO "sandboxes" VALUES('idddddddddddddddddddd','default','local','base','','creating',0,1790000000000000,NULL,NULL,NULL,300000000,0,1,0,'{}','{}','{"cpu_count": 2, "memory_mb": 512, "disk_size_mb": 1024}',1,NULL,0,1,'{"id": "idddddddddddddddddddd"}',NULL,0,'retry-2',NULL,NULL,0,'n0123456789ab');
INSERT INTO "sandboxes" VALUES('ieeeeeeeeeeeeeeeeeeee','default','local','base','','killing',2,1790000000000000,1790000001000000,4900000000000000,NULL,300000000,0,1,0,'{}','{}','{"cpu_count": 2, "memory_mb": 512, "disk_size_mb": 1024}',1,NULL,0,1,'{"id": "ieeeeeeeeeeeeeeeeeeee"}',NULL,0,NULL,NULL,NULL,0,'n0123456789ab');
INSERT INTO "sandboxes" VALUES('iffffffffffffffffffff','default','local','base','','failed',1,1790000000000000,NULL,NULL,4900000000000000,300000000,0,1,0,'{}','{}','{"cpu_count": 2, "memory_mb": 512, "disk_size_mb": 1024}',1,NULL,0,1,'{"id": "iffffffffffffffffffff"}',NULL,0,NULL,NULL,NULL,0,'n0123456789ab');
INSERT INTO "sandboxes" VALUES('igggggggggggggggggggg','default','local','base','','paused',3,1790000000000000,1790000001000000,4900000000000000,NULL,300000000,0,1,0,'{}','{}','{"cpu_count": 2, "memory_mb": 512, "disk_size_mb": 1024}',1,NULL,1,1,'{"id": "igggggggggggggggggggg"}','full',0,NULL,NULL,NULL,0,'n0123456789ab');
INSERT INTO "sandboxes" VALUES('ihhhhhhhhhhhhhhhhhhhh','default','local','base','','paused',3,1790000000000000,1790000001000000,4900000000000000,NULL,300000000,0,1,0,'{}','{}','{"cpu_count": 2, "memory_mb": 512, "disk_size_mb": 1024}',1,NULL,0,1,'{"id": "ihhhhhhhhhhhhhhhhhhhh"}','filesystem',1,NULL,NULL,NULL,0,'n0123456789ab');
INSERT INTO "sandboxes" VALUES('ijjjjjjjjjjjjjjjjjjjj','default','local','base','','pausing',2,1790000000000000,1790000001000000,4900000000000000,NULL,300000000,0,1,0,'{}','{}','{"cpu_count": 2, "memory_mb": 512, "disk_size_mb": 1024}',1,NULL,0,1,'{"id": "ijjjjjjjjjjjjjjjjjjjj"}','full',0,NULL,NULL,NULL,0,'n0123456789ab');
INSERT INTO "sandboxes" VALUES('ikkkkkkkkkkkkkkkkkkkk','default','local','base','','snapshotting',2,1790000000000000,1790000001000000,4900000000000000,NULL,300000000,0,1,0,'{}','{}','{"cpu_count": 2, "memory_mb": 512, "disk_size_mb": 1024}',1,NULL,0,1,'{"id": "ikkkkkkkkkkkkkkkkkkkk"}',NULL,0,NULL,NULL,'{"template": "base", "default_user": "root", "workdir": "/srv", "start_command": "serve", "ready_command": ""}',0,'n0123456789ab');
INSERT INTO "sandboxes" VALUES('illllllllllllllllllll','default','local','base','','running',1,1790000000000000,1790000001000000,4900000000000000,NULL,300000000,0,1,0,'{}','{}','{"cpu_count": 2, "memory_mb": 512, "disk_size_mb": 1024}',1,'{"allow_out": ["a"], "deny_out": [], "allow_public_traffic": null, "mask_request_host": ""}',0,1,'{"id": "illllllllllllllllllll"}',NULL,0,NULL,NULL,'{"template": "base", "default_user": "root", "workdir": "/srv", "start_command": "serve", "ready_command": ""}',1,'n0123456789ab');
CREATE TABLE snapshots (
	content VARCHAR(64) NOT NULL,
	id VARCHAR(64) NOT NULL,
	owner VARCHAR(64) NOT NULL,
	backend VARCHAR(64) NOT NULL,
	name VARCHAR(128) NOT NULL,
	tag VARCHAR(128) NOT NULL,
	sandbox_id VARCHAR(64) NOT NULL,
	state VARCHAR(16) NOT NULL,
	created_at BIGINT NOT NULL,
	resources JSON NOT NULL,
	envs JSON NOT NULL,
	setup JSON NOT NULL,
	handle JSON,
	core VARCHAR(32) DEFAULT '' NOT NULL,
	PRIMARY KEY (content)
);
INSERT INTO "snapshots" VALUES('saaaaaaaaaaaaaaaaaaaa','saaaaaaaaaaaaaaaaaaaa','default','local','kept','default','iaaaaaaaaaaaaaaaaaaaa','ready',1790000000000000,'{"cpu_count": 2, "memory_mb": 512, "disk_size_mb": 1024}','{"X": "1"}','{"template": "base", "default_user": "root", "workdir": "/srv", "start_command": "serve", "ready_command": ""}','{"snapshot_id": "saaaaaaaaaaaaaaaaaaaa"}','');
INSERT INTO "snapshots" VALUES('sbbbbbbbbbbbbbbbbbbbb','sbbbbbbbbbbbbbbbbbbbb','lab','local','','','iaaaaaaaaaaaaaaaaaaaa','ready',1790000000000001,'{"cpu_count": 2, "memory_mb": 512, "disk_size_mb": 1024}','{"X": "1"}','{"template": "base", "default_user": "root", "workdir": "/srv", "start_command": "serve", "ready_command": ""}','{"snapshot_id": "sbbbbbbbbbbbbbbbbbbbb"}','');
INSERT INTO "snapshots" VALUES('scccccccccccccccccccc','saaaaaaaaaaaaaaaaaaaa','default','local','kept','default','iaaaaaaaaaaaaaaaaaaaa','deleting',1790000000000000,'{"cpu_count": 2, "memory_mb": 512, "disk_size_mb": 1024}','{"X": "1"}','{"template": "base", "default_user": "root", "workdir": "/srv", "start_command": "serve", "ready_command": ""}','{"snapshot_id": "scccccccccccccccccccc"}','');
INSERT INTO "snapshots" VALUES('sdddddddddddddddddddd','sdddddddddddddddddddd','default','local','','','iaaaaaaaaaaaaaaaaaaaa','making',1790000000000000,'{"cpu_count": 2, "memory_mb": 512, "disk_size_mb": 1024}','{"X": "1"}','{"template": "base", "default_user": "root", "workdir": "/srv", "start_command": "serve", "ready_command": ""}',NULL,'');
CREATE TABLE teams (
	id VARCHAR(64) NOT NULL,
	name TEXT NOT NULL,
	created_at BIGINT NOT NULL,
	max_sandboxes INTEGER,
	max_cpus INTEGER,
	max_memory_mb BIGINT,
	max_life BIGINT,
	creates_per_minute INTEGER,
	PRIMARY KEY (id)
);
INSERT INTO "teams" VALUES('default','Default',1790000000000000,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "teams" VALUES('lab','The lab',1790000000000000,5,8,4096,3600000000,30);
INSERT INTO "teams" VALUES('gone','gone',1790000000000000,NULL,NULL,NULL,NULL,NULL);
CREATE TABLE transitions (
	sandbox_id VARCHAR(64) NOT NULL,
	revision INTEGER NOT NULL,
	at BIGINT NOT NULL,
	from_state VARCHAR(16),
	to_state VARCHAR(16) NOT NULL,
	note TEXT NOT NULL,
	PRIMARY KEY (sandbox_id, revision),
	FOREIGN KEY(sandbox_id) REFERENCES sandboxes (id) ON DELETE CASCADE
);
INSERT INTO "transitions" VALUES('iaaaaaaaaaaaaaaaaaaaa',0,1790000000000000,NULL,'creating','create');
INSERT INTO "transitions" VALUES('iaaaaaaaaaaaaaaaaaaaa',1,1790000001000000,'creating','running','ready');
INSERT INTO "transitions" VALUES('ibbbbbbbbbbbbbbbbbbbb',0,1790000000000000,NULL,'creating','create');
INSERT INTO "transitions" VALUES('ibbbbbbbbbbbbbbbbbbbb',1,1790000001000000,'creating','running','ready');
INSERT INTO "transitions" VALUES('icccccccccccccccccccc',0,1790000000000000,NULL,'creating','create');
INSERT INTO "transitions" VALUES('icccccccccccccccccccc',1,1790000001000000,'creating','running','ready');
INSERT INTO "transitions" VALUES('idddddddddddddddddddd',0,1790000000000000,NULL,'creating','create');
INSERT INTO "transitions" VALUES('ieeeeeeeeeeeeeeeeeeee',0,1790000000000000,NULL,'creating','create');
INSERT INTO "transitions" VALUES('ieeeeeeeeeeeeeeeeeeee',1,1790000001000000,'creating','running','ready');
INSERT INTO "transitions" VALUES('iffffffffffffffffffff',0,1790000000000000,NULL,'creating','create');
INSERT INTO "transitions" VALUES('iffffffffffffffffffff',1,1790000001000000,'creating','failed','create failed');
INSERT INTO "transitions" VALUES('igggggggggggggggggggg',0,1790000000000000,NULL,'creating','create');
INSERT INTO "transitions" VALUES('igggggggggggggggggggg',1,1790000001000000,'creating','running','ready');
INSERT INTO "transitions" VALUES('ihhhhhhhhhhhhhhhhhhhh',0,1790000000000000,NULL,'creating','create');
INSERT INTO "transitions" VALUES('ihhhhhhhhhhhhhhhhhhhh',1,1790000001000000,'creating','running','ready');
INSERT INTO "transitions" VALUES('ijjjjjjjjjjjjjjjjjjjj',0,1790000000000000,NULL,'creating','create');
INSERT INTO "transitions" VALUES('ijjjjjjjjjjjjjjjjjjjj',1,1790000001000000,'creating','running','ready');
INSERT INTO "transitions" VALUES('ikkkkkkkkkkkkkkkkkkkk',0,1790000000000000,NULL,'creating','create');
INSERT INTO "transitions" VALUES('ikkkkkkkkkkkkkkkkkkkk',1,1790000001000000,'creating','running','ready');
INSERT INTO "transitions" VALUES('illllllllllllllllllll',0,1790000000000000,NULL,'creating','create');
INSERT INTO "transitions" VALUES('illllllllllllllllllll',1,1790000001000000,'creating','running','ready');
CREATE INDEX sandboxes_by_state ON sandboxes (state);
CREATE INDEX sandboxes_by_end ON sandboxes (ended_at);
CREATE UNIQUE INDEX sandboxes_by_idempotency_key ON sandboxes (owner, idempotency_key);
CREATE INDEX audit_by_time ON audit (at);
CREATE INDEX audit_by_subject ON audit (subject);
CREATE INDEX snapshots_by_owner ON snapshots (owner, created_at);
CREATE UNIQUE INDEX snapshots_by_id ON snapshots (id) WHERE state = 'ready';
CREATE UNIQUE INDEX snapshots_by_name ON snapshots (owner, name, tag) WHERE state = 'ready' AND name <> '';
CREATE INDEX command_logs_by_time ON command_logs (last_at);
COMMIT;
