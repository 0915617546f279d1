//! The processes that keep namespaces alive, and end what runs in them.
//!
//! One keeps the *world*: the user namespace of everything, and the network
//! namespace of the bridge. It reads from a pipe whose other end is ours alone, so
//! it notices when we are gone, also when we were killed; then it kills every
//! process of its user namespace, and ends. Each host is kept by a process that does
//! nothing. With the last process the kernel removes a namespace, and what is in it.
//!
//! Two designs were left aside. Named namespaces (`ip netns`) are root's alone, and
//! those of a killed run stay. A process namespace would have the kernel do all the
//! killing, but what `nsenter` starts in one is a child of its own: a test that kills
//! its [`Child`] would kill `nsenter`.

use std::ffi::OsStr;
use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use super::error::HostsError;
use super::programs::Programs;

/// None of these programs waits for anything: a program that takes so long hangs.
const PATIENCE: Duration = Duration::from_secs(30);

/// What keeps the world. Nobody writes to its input.
///
/// A process that was just being started is not in the namespace at the first look,
/// hence two looks in a row that find none. A dead one that its parent has not
/// waited for is found and left alone. Files in /proc vanish at any time.
const WORLD: &str = r#"
trap '' HUP INT QUIT TERM PIPE
exec 2>/dev/null
echo up
while read -r line; do :; done
empty=0
while [ $empty -lt 2 ]; do
    empty=$((empty + 1))
    for process in /proc/[0-9]*; do
        number=${process#/proc/}
        [ "$number" != $$ ] || continue
        [ "$process/ns/user" -ef /proc/$$/ns/user ] || continue
        read -r state < "$process/stat" || continue
        case "${state##*) }" in [ZX]*) continue ;; esac
        kill -9 "$number" && empty=0
    done
done
"#;

/// What keeps a host.
const HOST: &str = "trap '' HUP INT QUIT TERM PIPE; echo up; while read -r line; do :; done";

/// The keeper of the user namespace and of the bridge.
#[derive(Debug)]
pub(super) struct World(Holder);

impl World {
    pub(super) fn new(programs: &Programs) -> Result<Self, HostsError> {
        let mut unshare = Command::new(&programs.unshare);
        unshare
            .args(["--user", "--map-root-user", "--net", "--"])
            .arg(&programs.sh)
            .args(["-c", WORLD]);
        Holder::start(&mut unshare).map(Self)
    }

    pub(super) fn holder(&self) -> &Holder {
        &self.0
    }

    /// A network namespace of its own in the same user namespace.
    pub(super) fn host(&self, programs: &Programs) -> Result<Holder, HostsError> {
        let mut host = self.0.command(programs, programs.unshare.as_os_str());
        host.args(["--net", "--"])
            .arg(&programs.sh)
            .args(["-c", HOST]);
        Holder::start(&mut host)
    }
}

impl Drop for World {
    fn drop(&mut self) {
        drop(self.0.lifeline.take());
        // The end of its output is its own end: nobody else has it.
        if let Err(error) = line(&mut self.0.output, Instant::now() + PATIENCE) {
            eprintln!("what runs in the hosts could not be ended: {error}");
        }
    }
}

/// A process that does nothing but be in a namespace. Dropped, it is killed.
#[derive(Debug)]
pub(super) struct Holder {
    child: Child,
    lifeline: Option<ChildStdin>,
    output: ChildStdout,
}

impl Holder {
    /// Starts it and waits until it is in its namespace.
    fn start(command: &mut Command) -> Result<Self, HostsError> {
        let name = command.get_program().display().to_string();
        let io = |doing: &str| HostsError::io(format!("{doing} `{name}`"));
        let mut child = command
            // An interrupt from the keyboard is for us, and we are for it.
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(io("starting"))?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        let (lifeline, output) = pipes.expect("both were asked for");
        let mut holder = Self {
            child,
            lifeline: Some(lifeline),
            output,
        };
        let said = line(&mut holder.output, Instant::now() + PATIENCE)
            .map_err(io("waiting for the first word of"))?;
        if said == "up\n" {
            return Ok(holder);
        }
        // Without output it is at its end, and its last words are a line.
        let mut complaint = String::new();
        if let Some(mut errors) = holder.child.stderr.take() {
            let _ = errors.read_to_string(&mut complaint);
        }
        Err(HostsError::refused(&format!("{said}{complaint}")))
    }

    /// By which the system knows it.
    pub(super) fn number(&self) -> u32 {
        self.child.id()
    }

    /// A command in its namespaces. The user is not changed: it is root in there
    /// already.
    pub(super) fn command(&self, programs: &Programs, program: &OsStr) -> Command {
        let mut command = Command::new(&programs.nsenter);
        command
            .args(["--user", "--net", "--preserve-credentials", "--target"])
            .arg(self.number().to_string())
            .arg("--")
            .arg(program);
        command
    }

    /// Has `ip` or `tc` do what the lines say, up to the first that fails.
    pub(super) fn batch(
        &self,
        programs: &Programs,
        program: &Path,
        lines: &str,
    ) -> Result<(), HostsError> {
        let name = program.file_name().unwrap_or_default().display();
        let io = |doing: &str| HostsError::io(format!("{doing} `{name}`"));
        let mut child = self
            .command(programs, program.as_os_str())
            .args(["-batch", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(io("starting"))?;
        if let Some(mut input) = child.stdin.take() {
            // One that reads no further says why.
            let _ = input.write_all(lines.as_bytes());
        }
        let output = child.wait_with_output().map_err(io("waiting for"))?;
        if output.status.success() {
            return Ok(());
        }
        Err(HostsError::Failed {
            step: format!("{name} {}", lines.trim_end().replace('\n', "; ")),
            said: String::from_utf8_lossy(&output.stderr).trim().into(),
        })
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The next line, or what there was before the end, which is of some bytes only.
fn line(from: &mut ChildStdout, until: Instant) -> io::Result<String> {
    let mut bytes = Vec::new();
    while !bytes.ends_with(b"\n") && bytes.len() < 4096 {
        wait(from, until)?;
        let mut byte = [0];
        match from.read(&mut byte) {
            Ok(0) => break,
            Ok(_) => bytes.push(byte[0]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Until there is something to read, or the end.
fn wait(from: &ChildStdout, until: Instant) -> io::Result<()> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).map_err(io::Error::other)?;
        match rustix::event::poll(&mut [PollFd::new(from, PollFlags::IN)], Some(&timeout)) {
            Ok(0) if left.is_zero() => {
                let text = format!("nothing for {} s", PATIENCE.as_secs());
                return Err(io::Error::new(io::ErrorKind::TimedOut, text));
            }
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}
