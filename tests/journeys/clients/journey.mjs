// What a first-time user does, with the JavaScript SDK. One line of JSON for each step, read by test_journey.py.
//
// Address and key come from E2B_API_URL, E2B_SANDBOX_URL and E2B_API_KEY, as they do for the user. SERVER_PORT is one that is
// free, as sandboxes with internet may share the machine's ports.
import assert from 'node:assert/strict'
import { randomUUID } from 'node:crypto'
import { get } from 'node:http'
import * as e2b from 'e2b'

const { Sandbox } = e2b
const MARK = randomUUID()
const METADATA = { journey: MARK, 'é &': 'a=b' }

// A failed step is told and the journey goes on, so that one fault does not hide the next.
async function step(name, body) {
  try {
    const value = await body()
    console.log(JSON.stringify({ step: name, ok: true }))
    return value
  } catch (error) {
    console.log(JSON.stringify({ step: name, ok: false, error: `${error.stack ?? error}` }))
  }
}

// Exactly this class, not a relative of it.
async function raises(name, call, ...texts) {
  let caught
  try {
    await call()
  } catch (error) {
    caught = error
  }
  assert(caught, `raised nothing instead of ${name}`)
  assert.equal(caught.constructor, e2b[name], `raised ${caught.stack ?? caught}`)
  for (const text of texts) assert(caught.message.includes(text), `${text} is not in ${caught.message}`)
  return caught
}

// A snapshot; null where the gateway's backend keeps none, which it must say.
async function taken(take) {
  try {
    return await take()
  } catch (error) {
    if (!error.message.includes('does not offer snapshots')) throw error
    return null
  }
}

async function listed(metadata) {
  return (await Sandbox.list({ query: { metadata } }).nextItems()).map((item) => item.sandboxId)
}

async function remaining(sandbox) {
  return ((await sandbox.getInfo()).endAt.getTime() - Date.now()) / 1000
}

async function information(sandbox) {
  await step('get_info', async () => {
    const info = await sandbox.getInfo()
    assert.equal(info.sandboxId, sandbox.sandboxId)
    assert.deepEqual(info.metadata, METADATA)
    assert.equal(info.state, 'running')
    const life = (info.endAt.getTime() - info.startedAt.getTime()) / 1000
    assert(life > 115 && life < 125, `${life}`)
  })
  await step('list_by_metadata', async () => {
    assert.deepEqual(await listed(METADATA), [sandbox.sandboxId])
    assert.deepEqual(await listed({ journey: 'another' }), [])
  })
}

async function commands(sandbox) {
  await step('run_with_envs_and_cwd', async () => {
    await sandbox.files.makeDir('place')
    const options = { envs: { NAME: 'wörld\n$x' }, cwd: 'place' }
    const result = await sandbox.commands.run('echo "$GREETING $NAME"; pwd', options)
    assert.equal(result.exitCode, 0)
    const lines = result.stdout.split('\n')
    assert.deepEqual(lines.slice(0, 2), ['hello wörld', '$x'])
    assert(lines[2].endsWith('/place'), lines[2])
  })
  await step('envs_last_one_command', async () => {
    assert.equal((await sandbox.commands.run('echo "$GREETING,$NAME"')).stdout, 'hello,\n')
  })
  // The command waits for a file that is written only once its first line has arrived.
  await step('output_while_running', async () => {
    const order = []
    const onStdout = async (text) => {
      order.push(text)
      if (text === 'first\n') await sandbox.files.write('go-on', '')
    }
    const command = 'echo first; until [ -e go-on ]; do sleep 0.05; done; echo second'
    const result = await sandbox.commands.run(command, { onStdout, timeoutMs: 40_000 })
    assert.deepEqual(order, ['first\n', 'second\n'])
    assert.equal(result.stdout, 'first\nsecond\n')
  })
  await step('failing_command', async () => {
    const error = await raises('CommandExitError', () => sandbox.commands.run('echo out; echo err >&2; exit 3'))
    assert.deepEqual([error.exitCode, error.stdout, error.stderr], [3, 'out\n', 'err\n'])
  })
  await step('death_by_signal', async () => {
    const error = await raises('CommandExitError', () => sandbox.commands.run('kill -9 $$'))
    assert.deepEqual([error.exitCode, error.error], [-1, 'signal: killed'])
  })
  await step('command_timeout', async () => {
    const began = Date.now()
    await raises('TimeoutError', () => sandbox.commands.run('sleep 50', { timeoutMs: 1000 }))
    assert(Date.now() - began < 20_000)
    // This SDK also times the stream itself, so its error may come a moment before the gateway's.
    for (let tries = 0; (await sandbox.commands.list()).length > 0; tries++) {
      assert(tries < 200, 'the command is still listed')
      await new Promise((resolve) => setTimeout(resolve, 50))
    }
  })
  await step('missing_cwd', () =>
    raises('InvalidArgumentError', () => sandbox.commands.run('pwd', { cwd: '/no/such' }), '/no/such')
  )
  await step('unknown_user', () =>
    raises(
      'AuthenticationError',
      () => sandbox.commands.run('id', { user: 'nobody-of-this-name' }),
      'nobody-of-this-name'
    )
  )
}

async function inputAndBackground(sandbox) {
  await step('stdin', async () => {
    const options = { background: true, stdin: true, timeoutMs: 40_000 }
    const handle = await sandbox.commands.run('cat; echo end', options)
    await sandbox.commands.sendStdin(handle.pid, 'one\n')
    await sandbox.commands.sendStdin(handle.pid, 'zwö\n')
    await sandbox.commands.closeStdin(handle.pid)
    assert.equal((await handle.wait()).stdout, 'one\nzwö\nend\n')
  })
  await step('background_and_connect', async () => {
    const command = 'until [ -e release ]; do sleep 0.05; done; echo released; exit 4'
    const handle = await sandbox.commands.run(command, { background: true, timeoutMs: 0 })
    await handle.disconnect()
    assert.deepEqual((await sandbox.commands.list()).map((item) => item.pid), [handle.pid])
    const again = await sandbox.commands.connect(handle.pid, { timeoutMs: 40_000 })
    await sandbox.files.write('release', '')
    const error = await raises('CommandExitError', () => again.wait())
    assert.deepEqual([error.exitCode, error.stdout], [4, 'released\n'])
    assert.deepEqual(await sandbox.commands.list(), [])
  })
  await step('background_and_kill', async () => {
    const handle = await sandbox.commands.run('sleep 300', { background: true, timeoutMs: 0 })
    assert.equal(await handle.kill(), true)
    await raises('CommandExitError', () => handle.wait())
    assert.equal(await sandbox.commands.kill(handle.pid), false)
  })
  await step('connect_to_unknown_pid', () => raises('NotFoundError', () => sandbox.commands.connect(999999)))
  await step('sudo', async () => {
    const becomeRoot = await sandbox.commands.run('sudo echo "$FOO"; sudo id -u', { envs: { FOO: 'bar' } })
    assert.equal(becomeRoot.stdout, 'bar\n0\n')
  })
}

async function terminals(sandbox) {
  const bytes = (text) => new TextEncoder().encode(text)
  const pieces = []
  const onData = (data) => pieces.push(Buffer.from(data))
  const seen = () => Buffer.concat(pieces.splice(0)).toString()
  await step('terminal', async () => {
    const terminal = await sandbox.pty.create({ rows: 24, cols: 80, onData, timeoutMs: 60_000 })
    await sandbox.pty.resize(terminal.pid, { rows: 40, cols: 133 })
    await sandbox.pty.sendInput(terminal.pid, bytes("stty size; printf '─漢😀\\n'; exit 3\n"))
    const error = await raises('CommandExitError', () => terminal.wait())
    assert.equal(error.exitCode, 3)
    assert(seen().includes('40 133\r\n─漢😀\r\n'))
  })
  await step('terminal_connect', async () => {
    const terminal = await sandbox.pty.create({ rows: 24, cols: 80, onData, timeoutMs: 0 })
    await terminal.disconnect()
    assert.deepEqual((await sandbox.commands.list()).map((item) => item.pid), [terminal.pid])
    const again = await sandbox.pty.connect(terminal.pid, { onData, timeoutMs: 60_000 })
    await sandbox.pty.sendInput(terminal.pid, bytes("echo st''ill here; exit\n"))
    await again.wait()
    assert(seen().includes('still here\r\n'))
  })
  await step('terminal_kill', async () => {
    const terminal = await sandbox.pty.create({ rows: 24, cols: 80, onData, timeoutMs: 0 })
    assert.equal(await sandbox.pty.kill(terminal.pid), true)
    await raises('CommandExitError', () => terminal.wait())
    assert.equal(await sandbox.pty.kill(terminal.pid), false)
    assert.deepEqual(await sandbox.commands.list(), [])
  })
}

async function transfers(sandbox) {
  const content = Array.from({ length: 200_000 }, (_, number) => `line ${number}\n`).join('')
  await step('gzip_both_ways', async () => {
    await sandbox.files.write('transfers/zipped', content, { gzip: true })
    assert.equal(await sandbox.files.read('transfers/zipped', { gzip: true }), content)
    const counted = await sandbox.commands.run('wc -c < transfers/zipped')
    assert.equal(Number(counted.stdout), content.length)
  })
  await step('stream_up_and_down', async () => {
    await sandbox.files.write('transfers/streamed', new Blob([content]).stream())
    const pieces = []
    for await (const piece of await sandbox.files.read('transfers/streamed', { format: 'stream' })) pieces.push(piece)
    assert(Buffer.from(content).equals(Buffer.concat(pieces)))
    await sandbox.files.write('transfers/text', 'zwei\n', { useOctetStream: true })
    assert.equal(await sandbox.files.read('transfers/text'), 'zwei\n')
  })
  await step('file_metadata', async () => {
    const metadata = { author: 'me', kind: 'a b' }
    const written = await sandbox.files.write('transfers/named', 'x', { metadata: { Author: 'me', kind: 'a b' } })
    assert.deepEqual(written.metadata, metadata)
    assert.deepEqual((await sandbox.files.getInfo('transfers/named')).metadata, metadata)
    const found = await sandbox.files.list('transfers')
    assert.deepEqual(found.find((entry) => entry.name === 'named').metadata, metadata)
    assert(!Object.keys(found.find((entry) => entry.name === 'text').metadata ?? {}).length)
    const big = { metadata: { big: 'x'.repeat(5000) } }
    await raises('InvalidArgumentError', () => sandbox.files.write('transfers/named', 'x', big))
  })
  await step('signed_urls', async () => {
    const upload = await sandbox.uploadUrl('transfers/by url é', { useSignatureExpiration: 60 })
    assert.equal(await send(upload, 'ignored', 'sent by url'), 200)
    assert.equal(await sandbox.files.read('transfers/by url é'), 'sent by url')
    // Without a path the name in the form decides.
    assert.equal(await send(await sandbox.uploadUrl(), 'transfers/by form', 'sent by form'), 200)
    assert.equal(await sandbox.files.read('transfers/by form'), 'sent by form')
    const download = await sandbox.downloadUrl('transfers/by url é')
    assert.equal(await (await fetch(download)).text(), 'sent by url')
    assert.equal(await send(download, 'other', 'overwritten'), 401)
    const late = await sandbox.uploadUrl('other', { useSignatureExpiration: -60 })
    assert.equal(await send(late, 'other', 'late'), 401)
    assert.equal(await sandbox.files.exists('other'), false)
  })
}

// Upload with a plain client; the status.
async function send(url, name, content) {
  const form = new FormData()
  form.append('file', new Blob([content]), name)
  const answer = await fetch(url, { method: 'POST', body: form })
  await answer.arrayBuffer()
  return answer.status
}

async function watching(sandbox) {
  let seen = []
  const onEvent = (event) => void seen.push(event)
  async function told(count) {
    for (const end = Date.now() + 20_000; seen.length < count && Date.now() < end; ) {
      await new Promise((resolve) => setTimeout(resolve, 10))
    }
    const events = seen
    seen = []
    return events
  }
  await step('watch_dir', async () => {
    await sandbox.files.makeDir('watched')
    const handle = await sandbox.files.watchDir('watched', onEvent, { includeEntry: true })
    await sandbox.files.write('watched/new.txt', 'x')
    let events = await told(3)
    const types = events.map((event) => [event.name, event.type])
    assert.deepEqual(types, [['new.txt', 'create'], ['new.txt', 'chmod'], ['new.txt', 'write']])
    assert(events.every((event) => event.entry?.name === 'new.txt'), JSON.stringify(events))
    await sandbox.files.rename('watched/new.txt', 'watched/newer.txt')
    await sandbox.files.remove('watched/newer.txt')
    events = (await told(3)).map((event) => [event.name, event.type])
    assert.deepEqual(events, [['new.txt', 'rename'], ['newer.txt', 'create'], ['newer.txt', 'remove']])
    await handle.stop()
    assert.deepEqual(seen, [])
  })
  await step('watch_dir_recursive', async () => {
    const handle = await sandbox.files.watchDir('watched', onEvent, { recursive: true })
    await sandbox.files.write('watched/a/b/c.txt', 'x')
    const names = []
    while (names.length < 3) {
      const events = await told(1)
      assert(events.length, 'no more events came')
      names.push(...events.filter((event) => event.type === 'create').map((event) => event.name))
    }
    assert.deepEqual(names, ['a', 'a/b', 'a/b/c.txt'])
    await handle.stop()
  })
  await step('watch_what_cannot_be_watched', async () => {
    await raises('FileNotFoundError', () => sandbox.files.watchDir('no/such', onEvent))
    await raises('InvalidArgumentError', () => sandbox.files.watchDir('notes/bytes', onEvent))
  })
}

async function files(sandbox) {
  await step('write_and_read', async () => {
    const written = await sandbox.files.write('notes/day one.txt', 'grün\n')
    assert.equal(written.name, 'day one.txt')
    assert(written.path.endsWith('/notes/day one.txt'), written.path)
    assert.equal(await sandbox.files.read('notes/day one.txt'), 'grün\n')
    assert.equal((await sandbox.commands.run("cat 'notes/day one.txt'")).stdout, 'grün\n')
  })
  await step('bytes_and_empty', async () => {
    const content = Buffer.alloc(256 * 2048, Buffer.from(Array.from({ length: 256 }, (_, index) => index)))
    await sandbox.files.write('notes/bytes', new Blob([content]))
    assert(content.equals(await sandbox.files.read('notes/bytes', { format: 'bytes' })))
    await sandbox.files.write('notes/empty', '')
    assert.equal(await sandbox.files.read('notes/empty'), '')
    const pieces = []
    for await (const piece of await sandbox.files.read('notes/bytes', { format: 'stream' })) pieces.push(piece)
    assert(content.equals(Buffer.concat(pieces)))
  })
  await step('write_several', async () => {
    const names = ['several/a.txt', 'several/b/ü+%20 \'q".txt']
    await sandbox.files.write(names.map((name) => ({ path: name, data: name })))
    for (const name of names) assert.equal(await sandbox.files.read(name), name)
  })
  await step('list_files', async () => {
    const entries = (await sandbox.files.list('several')).map((entry) => [entry.name, entry.type])
    assert.deepEqual(entries, [['a.txt', 'file'], ['b', 'dir']])
    assert.equal((await sandbox.files.list('several', { depth: 2 })).length, 3)
  })
  await step('file_info', async () => {
    const info = await sandbox.files.getInfo('notes/day one.txt')
    assert.deepEqual([info.name, info.type, Number(info.size)], ['day one.txt', 'file', Buffer.byteLength('grün\n')])
    assert.equal(info.permissions, '-rw-r--r--')
  })
  await step('exists', async () => {
    assert.equal(await sandbox.files.exists('notes/empty'), true)
    assert.equal(await sandbox.files.exists('notes/none'), false)
  })
  await step('rename', async () => {
    const moved = await sandbox.files.rename('notes/empty', 'notes/renamed')
    assert(moved.path.endsWith('/notes/renamed'), moved.path)
    assert.equal(await sandbox.files.exists('notes/empty'), false)
    assert.equal(await sandbox.files.exists('notes/renamed'), true)
  })
  await step('make_dir', async () => {
    assert.equal(await sandbox.files.makeDir('deep/er/est'), true)
    assert.equal(await sandbox.files.makeDir('deep/er/est'), false)
  })
  await step('remove', async () => {
    await sandbox.files.remove('deep')
    assert.equal(await sandbox.files.exists('deep'), false)
    await sandbox.files.remove('deep')
  })
  await transfers(sandbox)
  await watching(sandbox)
  await step('missing_file', async () => {
    await raises('FileNotFoundError', () => sandbox.files.read('no/such'))
    await raises('FileNotFoundError', () => sandbox.files.list('no/such'))
    await raises('FileNotFoundError', () => sandbox.files.getInfo('no/such'))
    await raises('FileNotFoundError', () => sandbox.files.rename('no/such', 'other'))
  })
  await step('wrong_kind_of_path', async () => {
    await raises('InvalidArgumentError', () => sandbox.files.read('notes'))
    await raises('InvalidArgumentError', () => sandbox.files.write('notes', 'x'))
    await raises('InvalidArgumentError', () => sandbox.files.list('notes/bytes'))
  })
}

async function life(sandbox) {
  await step('is_running', async () => assert.equal(await sandbox.isRunning(), true))
  await step('set_timeout', async () => {
    await sandbox.setTimeout(600_000)
    assert((await remaining(sandbox)) > 500)
    await sandbox.setTimeout(90_000)
    assert((await remaining(sandbox)) < 100)
  })
  await step('connect', async () => {
    const again = await Sandbox.connect(sandbox.sandboxId, { timeoutMs: 30_000 })
    // A running sandbox's end never moves forward by a connect (C42).
    assert((await remaining(again)) > 50)
    assert.equal(await again.files.read('notes/day one.txt'), 'grün\n')
    assert.equal((await again.commands.run('echo again')).stdout, 'again\n')
  })
  await step('unknown_template', () => raises('SandboxError', () => Sandbox.create('no-such-template'), '404'))
  await step('wrong_api_key', () =>
    raises('AuthenticationError', () => Sandbox.create({ apiKey: `e2b_${'0'.repeat(40)}` }))
  )
}

async function pauses(sandbox) {
  await step('metrics', async () => {
    const [sample] = await eventually(async () => {
      const samples = await sandbox.getMetrics()
      return samples.length > 0 && samples
    })
    assert(sample.memUsed > 0 && sample.memUsed < sample.memTotal)
    assert(sample.cpuCount > 0)
  })
  let worker
  await step('pause', async () => {
    await sandbox.files.write('over the pause', 'kept')
    worker = await sandbox.commands.run('sleep 1000', { background: true, timeoutMs: 0 })
    assert.equal(await sandbox.pause(), true)
    assert.equal((await sandbox.getInfo()).state, 'paused')
    assert.equal(await sandbox.isRunning(), false)
  })
  await step('pause_again', async () => assert.equal(await sandbox.pause(), false))
  await step('connect_resumes', async () => {
    const again = await Sandbox.connect(sandbox.sandboxId, { timeoutMs: 90_000 })
    assert.equal((await again.getInfo()).state, 'running')
    const left = await remaining(again)
    assert(left > 60 && left < 100, `${left}`)
    assert((await again.commands.list()).some((process) => process.pid === worker.pid))
    assert.equal(await again.files.read('over the pause'), 'kept')
  })
  await step('pause_files_only', async () => {
    // Its process is ended, and so is the stream that this script waits on.
    const ended = worker.wait().catch(() => {})
    assert.equal(await sandbox.pause({ keepMemory: false }), true)
    await ended
    const again = await Sandbox.connect(sandbox.sandboxId, { timeoutMs: 90_000 })
    assert.deepEqual(await again.commands.list(), [])
    assert.equal(await again.files.read('over the pause'), 'kept')
    assert.equal((await again.commands.run('echo anew')).stdout, 'anew\n')
  })
  await step('snapshots', async () => {
    await sandbox.files.write('in the snapshot', 'before')
    const name = `journey-${process.pid}`
    const snapshot = await taken(() => sandbox.createSnapshot({ name }))
    if (snapshot === null) return
    assert.ok(snapshot.names.some((full) => full.includes(name)))
    await sandbox.files.write('in the snapshot', 'after')
    const copy = await Sandbox.create(snapshot.snapshotId, { timeoutMs: 60_000 })
    assert.equal(await copy.files.read('in the snapshot'), 'before')
    assert.equal((await copy.getInfo()).templateId, snapshot.snapshotId)
    const listed = await sandbox.listSnapshots().nextItems()
    assert.ok(listed.some((item) => item.snapshotId === snapshot.snapshotId))
    assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), true)
    assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), false)
    assert.equal(await copy.files.read('in the snapshot'), 'before')
    await copy.kill()
  })
  await step('pause_at_the_end', async () => {
    const short = await Sandbox.create({ timeoutMs: 2_000, lifecycle: { onTimeout: 'pause' } })
    const paused = async () => (await short.getInfo()).state === 'paused'
    await eventually(paused)
    // The choice outlives the resume (B44).
    await Sandbox.connect(short.sandboxId, { timeoutMs: 2_000 })
    await eventually(paused)
    assert.equal(await short.kill(), true)
  })
  await step('traffic_wakes', async () => {
    const sleeper = await Sandbox.create({ timeoutMs: 60_000, lifecycle: { onTimeout: 'pause', autoResume: true } })
    assert.equal(await sleeper.pause(), true)
    assert.equal((await sleeper.commands.run('echo woken')).stdout, 'woken\n')
    assert.equal((await sleeper.getInfo()).state, 'running')
    await sleeper.kill()
  })
  await step('get_host', async () => {
    const port = Number(process.env.SERVER_PORT)
    const serve = `python3 -m http.server ${port} --bind 127.0.0.1`
    const server = await sandbox.commands.run(serve, { background: true, timeoutMs: 0 })
    await sandbox.files.write('page.html', '<p>a page</p>')
    const host = sandbox.getHost(port)
    assert(host.startsWith(`${port}-${sandbox.sandboxId}.`))
    assert.equal(await eventually(() => pageOf(host)), '<p>a page</p>')
    await server.kill()
  })
}

// As a browser would ask for it whose DNS leads the host to the gateway; nothing while the server is not up. fetch sets no Host.
function pageOf(host) {
  return new Promise((resolve, reject) => {
    const asked = get(`${process.env.E2B_SANDBOX_URL}/page.html`, { headers: { Host: host } }, async (reply) => {
      let page = ''
      for await (const piece of reply) page += piece
      resolve(reply.statusCode === 502 ? '' : page)
    })
    asked.on('error', reject)
  })
}

async function eventually(ask) {
  for (let attempt = 0; attempt < 300; attempt++) {
    const answer = await ask()
    if (answer) return answer
    await new Promise((resolve) => setTimeout(resolve, 100))
  }
  assert.fail('it did not come to pass')
}

// B16: the waiting call ends at once and says that the sandbox is gone.
async function killWhileACommandRuns(sandbox) {
  let started
  const up = new Promise((resolve) => (started = resolve))
  const ended = sandbox.commands.run('echo up; sleep 300', { timeoutMs: 0, onStdout: started }).then(
    () => [undefined, Date.now()],
    (error) => [error.constructor, Date.now()]
  )
  await Promise.race([up, ended])
  const killed = Date.now()
  assert.equal(await sandbox.kill(), true)
  const [kind, at] = await ended
  assert.equal(kind, e2b.TimeoutError)
  assert(at - killed < 3000, `${at - killed} ms`)
}

async function end(sandbox) {
  await step('kill_while_a_command_runs', () => killWhileACommandRuns(sandbox))
  await step('kill_again', async () => assert.equal(await sandbox.kill(), false))
  await step('gone_is_not_running', async () => assert.equal(await sandbox.isRunning(), false))
  await step('gone_for_the_control_plane', async () => {
    await raises('SandboxNotFoundError', () => sandbox.getInfo())
    await raises('SandboxNotFoundError', () => sandbox.setTimeout(60_000))
    await raises('SandboxNotFoundError', () => Sandbox.connect(sandbox.sandboxId))
  })
  await step('gone_for_commands', () => raises('SandboxNotFoundError', () => sandbox.commands.run('echo')))
  await step('gone_for_files', async () => {
    await raises('TimeoutError', () => sandbox.files.read('notes/bytes'))
    await raises('TimeoutError', () => sandbox.files.exists('notes'))
  })
  await step('gone_from_the_list', async () => assert.deepEqual(await listed({ journey: MARK }), []))
}

const sandbox = await step('create', async () => {
  const made = await Sandbox.create({ timeoutMs: 120_000, metadata: METADATA, envs: { GREETING: 'hello' } })
  assert.match(made.sandboxId, /^[a-z0-9]+$/)
  return made
})
if (sandbox) {
  for (const part of [information, commands, inputAndBackground, terminals, files, life, pauses, end]) await part(sandbox)
}
