//! A real S3 server for one test process: moto, in Python.
//!
//! A client takes its endpoint and its keys from the environment, and a program cannot set that of
//! its own safely. So the test binary starts the server and then itself again, with the environment
//! of that server and, as its standard input, a listener whose address is the endpoint.

use std::io::{self, BufRead, BufReader, Read};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Command, ExitCode, Stdio};

/// The Python that has moto.
const PYTHON: &str = "WEIGHTSYNC_OBJECTS_PYTHON";
/// The address of the server, in the second process.
const SERVER: &str = "WEIGHTSYNC_OBJECTS_SERVER";

/// The bucket there is.
pub const BUCKET: &str = "weightsync";

/// One request after the other: moto does not check a condition and write in one step. It ends with
/// its standard input, however the test ends.
const MOTO: &str = "
import os, sys, threading
from moto.server import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

app = DomainDispatcherApplication(create_backend_app)
server = make_server('127.0.0.1', 0, app, request_handler=MotoRequestHandler)
print(server.port, flush=True)
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
server.serve_forever()
";

/// Where the second process finds what. The suite, which has no proxy, uses neither.
#[allow(dead_code)]
pub struct Ends {
    /// The server.
    pub server: SocketAddr,
    /// What clients connect to, where a proxy is asked for.
    pub endpoint: TcpListener,
}

/// What this process is to do.
pub enum Role {
    /// To be the test, with a server.
    Test(Ends),
    /// To end: the test ran in another process.
    Ended(ExitCode),
}

/// Starts the server and this binary again, or finds them started.
///
/// # Errors
///
/// What is missing, and how to get it.
pub fn provide(proxied: bool) -> Result<Role, String> {
    if let Ok(server) = std::env::var(SERVER) {
        let server = server.parse().map_err(|_| format!("{SERVER}: {server}"))?;
        let endpoint = io::stdin().as_fd().try_clone_to_owned();
        let endpoint = TcpListener::from(endpoint.map_err(|error| error.to_string())?);
        return Ok(Role::Test(Ends { server, endpoint }));
    }
    let python = std::env::var_os(PYTHON).ok_or_else(|| {
        format!(
            "{PYTHON} is not set, which names a Python with the packages of \
             python/requirements-objects.txt: run `cargo xtask test`, or make one with \
             `python3 -m venv DIR && DIR/bin/pip install -r python/requirements-objects.txt`, and \
             set it to DIR/bin/python"
        )
    })?;
    let failed = |error: io::Error| format!("moto, run by {}: {error}", python.display());
    let mut moto = Command::new(&python);
    moto.args(["-c", MOTO])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    let mut moto = Moto(moto.spawn().map_err(failed)?);
    let address = moto.address().map_err(failed)?;
    make_bucket(address).map_err(failed)?;
    let endpoint = TcpListener::bind("127.0.0.1:0").map_err(failed)?;
    let at = match proxied {
        true => endpoint.local_addr().map_err(failed)?,
        false => address,
    };
    let own = std::env::current_exe().map_err(failed)?;
    let status = Command::new(own)
        .args(std::env::args_os().skip(1))
        .env(SERVER, address.to_string())
        .env("AWS_ENDPOINT_URL", format!("http://{at}"))
        .env("AWS_ALLOW_HTTP", "true")
        .env("AWS_REGION", "us-east-1")
        .env("AWS_ACCESS_KEY_ID", "test")
        .env("AWS_SECRET_ACCESS_KEY", "test")
        // Longer than anything takes on a busy machine, and short enough to wait for.
        .env("AWS_TIMEOUT", "10s")
        .stdin(OwnedFd::from(endpoint))
        .status()
        .map_err(failed)?;
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    Ok(Role::Ended(ExitCode::from(code.unwrap_or(101))))
}

struct Moto(Child);

impl Moto {
    /// Where it listens, once it does.
    fn address(&mut self) -> io::Result<SocketAddr> {
        let mut line = String::new();
        if let Some(output) = &mut self.0.stdout {
            BufReader::new(output).read_line(&mut line)?;
        }
        let port = line.trim().parse::<u16>();
        let port = port.map_err(|_| io::Error::other("it did not start"))?;
        Ok(([127, 0, 0, 1], port).into())
    }
}

impl Drop for Moto {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn make_bucket(server: SocketAddr) -> io::Result<()> {
    let request = format!(
        "PUT /{BUCKET} HTTP/1.1\r\nhost: {server}\r\nconnection: close\r\ncontent-length: 0\r\n\
         authorization: AWS4-HMAC-SHA256 Credential=test/20200101/us-east-1/s3/aws4_request\r\n\r\n"
    );
    let mut stream = TcpStream::connect(server)?;
    io::Write::write_all(&mut stream, request.as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    match answer.split(' ').nth(1) {
        Some("200") => Ok(()),
        _ => Err(io::Error::other(answer)),
    }
}
