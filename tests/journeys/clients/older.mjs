// What programs written for older releases of the JavaScript SDK do, in the words of those releases.
//
// Domain and key come from E2B_DOMAIN and E2B_API_KEY. One line of JSON for each step, read by test_older_releases.py; a step that the release
// lacks is not taken.
import assert from 'node:assert/strict'
import dns from 'node:dns'
import { randomUUID } from 'node:crypto'
import { Sandbox } from 'e2b'

const DOMAIN = process.env.E2B_DOMAIN
const METADATA = { release: randomUUID(), 'é &': 'a=b' }
const text = (bytes) => new TextDecoder().decode(bytes)
const bytes = (content) => new TextEncoder().encode(content)
const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds))

// In place of DNS.
const lookup = dns.lookup
dns.lookup = (host, options, done) => {
  if (!host.endsWith(DOMAIN.split(':')[0])) return lookup(host, options, done)
  const here = options.all ? [[{ address: '127.0.0.1', family: 4 }]] : ['127.0.0.1', 4]
  process.nextTick(done, null, ...here)
}

async function step(name, body) {
  try {
    await body()
    console.log(JSON.stringify({ step: name, ok: true }))
  } catch (error) {
    console.log(JSON.stringify({ step: name, ok: false, error: `${error.stack ?? error}` }))
  }
}

// A list, or a paginator.
async function listed() {
  const found = await Sandbox.list()
  return Array.isArray(found) ? found : found.nextItems()
}

async function commands(sandbox) {
  await step('run', async () => {
    const result = await sandbox.commands.run('echo $GREETING $NAME; pwd; id -un', { envs: { NAME: 'you' }, cwd: '/tmp' })
    assert.equal(result.stdout, 'hello you\n/tmp\nuser\n')
    await assert.rejects(sandbox.commands.run('exit 3'), (error) => error.exitCode === 3)
    assert.equal((await sandbox.commands.run('id -u', { user: 'root' })).stdout, '0\n')
  })
  await step('stream', async () => {
    const out = []
    const err = []
    const options = { onStdout: (piece) => out.push(piece), onStderr: (piece) => err.push(piece) }
    await sandbox.commands.run('echo a; echo b >&2; echo ü', options)
    assert.deepEqual([out.join(''), err.join('')], ['a\nü\n', 'b\n'])
  })
  await step('time_limit', () =>
    assert.rejects(sandbox.commands.run('sleep 50', { timeoutMs: 3000 }), (error) => error.name === 'TimeoutError')
  )
  await step('background', async () => {
    const handle = await sandbox.commands.run('sleep 60', { background: true })
    assert((await sandbox.commands.list()).some((command) => command.pid === handle.pid))
    assert.equal((await sandbox.commands.connect(handle.pid)).pid, handle.pid)
    assert.equal(await sandbox.commands.kill(handle.pid), true)
    assert.equal(await sandbox.commands.kill(handle.pid), false)
  })
  await step('stdin', async () => {
    const handle = await sandbox.commands.run('head -c 5', { background: true, stdin: true })
    await sandbox.commands.sendStdin(handle.pid, 'hello')
    assert.equal((await handle.wait()).stdout, 'hello')
  })
  await step('terminal', async () => {
    let shown = ''
    const terminal = await sandbox.pty.create({ cols: 80, rows: 24, onData: (piece) => (shown += text(piece)) })
    await sandbox.pty.resize(terminal.pid, { cols: 100, rows: 30 })
    await sandbox.pty.sendInput(terminal.pid, bytes('echo $((40+2))\nexit\n'))
    await terminal.wait()
    assert(shown.includes('42'), shown)
  })
}

async function files(sandbox) {
  await step('files', async () => {
    assert.equal((await sandbox.files.write('d/a.txt', 'text')).path, '/home/user/d/a.txt')
    assert.equal(await sandbox.files.read('d/a.txt'), 'text')
    assert.deepEqual([await sandbox.files.exists('d/a.txt'), await sandbox.files.exists('nothing')], [true, false])
    assert.deepEqual([await sandbox.files.makeDir('e'), await sandbox.files.makeDir('e')], [true, false])
    assert.deepEqual((await sandbox.files.list('d')).map((entry) => [entry.name, entry.type]), [['a.txt', 'file']])
    assert.equal((await sandbox.files.rename('d/a.txt', 'd/b.txt')).path, '/home/user/d/b.txt')
    await sandbox.files.write('d/b.txt', new Uint8Array([0, 255]).buffer)
    assert.deepEqual([...(await sandbox.files.read('d/b.txt', { format: 'bytes' }))], [0, 255])
    await sandbox.files.remove('d/b.txt')
    for (const call of ['read', 'list'])
      await assert.rejects(sandbox.files[call]('d/b.txt'), (error) => error.name === 'NotFoundError')
  })
  await step('watch', async () => {
    await sandbox.files.makeDir('w')
    let seen
    const event = new Promise((resolve) => (seen = resolve))
    const watch = await sandbox.files.watchDir('w', (found) => found.name === 'x' && seen())
    await sandbox.files.write('w/x', '1')
    await event
    await watch.stop()
  })
  await step('urls', async () => {
    const body = new FormData()
    body.append('file', new Blob(['by url']))
    const done = await fetch(await sandbox.uploadUrl('u'), { method: 'POST', body })
    assert.equal(done.status, 200)
    assert.equal(await (await fetch(await sandbox.downloadUrl('u'))).text(), 'by url')
  })
}

async function others(sandbox) {
  await step('list', async () => {
    const own = (await listed()).filter((item) => sandbox.sandboxId.startsWith(item.sandboxId))
    assert.deepEqual(own.map((item) => item.metadata), [METADATA])
  })
  if (sandbox.getInfo !== undefined)
    await step('get_info', async () => {
      const info = await sandbox.getInfo()
      assert(info.endAt > info.startedAt)
    })
  if (sandbox.getMetrics !== undefined)
    await step('metrics', async () => {
      let found = []
      for (let tries = 0; found.length === 0 && tries < 150; tries++) {
        await pause(200)
        found = await sandbox.getMetrics()
      }
      assert(found[0].cpuCount > 0)
    })
  await step('set_timeout', () => sandbox.setTimeout(90_000))
  await step('connect', async () => {
    const again = await Sandbox.connect(sandbox.sandboxId)
    assert.equal((await again.commands.run('echo again')).stdout, 'again\n')
  })
  const halt = sandbox.pause ?? sandbox.betaPause
  if (halt !== undefined)
    await step('pause', async () => {
      await sandbox.files.write('kept', 'as it was')
      await halt.call(sandbox)
      const resumed = await (Sandbox.resume ?? Sandbox.connect).call(Sandbox, sandbox.sandboxId)
      assert.equal(await resumed.files.read('kept'), 'as it was')
    })
}

let sandbox
await step('create', async () => {
  sandbox = await Sandbox.create({ timeoutMs: 120_000, metadata: METADATA, envs: { GREETING: 'hello' } })
  assert(await sandbox.isRunning())
  assert.equal(sandbox.getHost(3000), `3000-${sandbox.sandboxId}.${DOMAIN}`)
})
await commands(sandbox)
await files(sandbox)
await others(sandbox)
await step('kill', async () => {
  await sandbox.kill()
  assert.equal(await Sandbox.kill(sandbox.sandboxId), false)
  assert.equal(await sandbox.isRunning(), false)
})
process.exit(0)
