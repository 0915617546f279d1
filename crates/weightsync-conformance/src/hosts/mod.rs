//! Hosts for tests, on one machine: network namespaces joined by a bridge.
//!
//! Each host has an address, a loopback of its own and one link to all others,
//! which can be slowed down, cut and restored while processes use it. Programs are
//! started in a host with [`Hosts::command`]. It works as root and as an ordinary
//! user, in the same way: everything is within one user namespace.
//!
//! **Nothing is left behind.** When [`Hosts`] is dropped, what runs in its hosts is
//! killed; when its process dies, however it dies, the same happens. Namespaces,
//! links and limits have no names outside and are the kernel's to remove when the
//! last process in them is gone, so parallel tests never meet and no run has to
//! sweep after another.
//!
//! # What it cannot do
//!
//! Delays and losses: the kernel's `netem` does both, and the machines this is
//! tested on do not have it. What depends on round-trip times or on lost packets
//! is not shown by a test that runs here. A full queue does lose packets: that of a
//! slow host ([`Hosts::rate`]).
//!
//! # Example
//!
//! ```no_run
//! use weightsync_conformance::hosts::Hosts;
//!
//! let hosts = Hosts::new(2)?;
//! let mut server = hosts.command(0, "iperf3").args(["-s", "-1"]).spawn()?;
//! hosts.rate(1, 1_000_000)?;
//! let to = hosts.address(0).to_string();
//! hosts.command(1, "iperf3").args(["-c", &to]).status()?;
//! server.wait()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod error;
mod holder;
mod programs;

use std::ffi::OsStr;
use std::net::Ipv4Addr;
use std::process::Command;

pub use error::HostsError;
use holder::{Holder, World};
use programs::Programs;

/// How many hosts one bridge is asked to join.
pub const MOST: usize = 250;

/// Bytes that may pass at once at the slowest rates: a few packets. Above them,
/// what the rate lets pass in [`BURST_MS`].
const LEAST_BURST: u64 = 4096;

/// A timer that fires late on a busy machine must not cost throughput. At 1 Gbit/s
/// iperf3 then gets 0.956 of the rate, and 0.957 is all that headers leave.
const BURST_MS: u64 = 4;

/// Bytes that may wait before some are dropped, at the slowest rates: half a second
/// at 1 Mbit/s. Above them, what the rate lets pass in [`QUEUE_MS`].
const LEAST_QUEUE: u64 = 64 << 10;

/// As long as the queue of a switch.
const QUEUE_MS: u64 = 25;

/// Some hosts, numbered from 0; each reaches each.
///
/// Calls that take the number of a host panic where there is no such host.
#[derive(Debug)]
pub struct Hosts {
    programs: Programs,
    hosts: Vec<Holder>,
    /// Dropped last: it ends whatever else is there.
    world: World,
}

impl Hosts {
    /// Makes `count` hosts that reach each other at the machine's full speed.
    ///
    /// # Errors
    ///
    /// [`HostsError::Missing`] and [`HostsError::NotAllowed`] when the machine lacks
    /// a program or does not allow namespaces, with what to install or to allow;
    /// [`HostsError::TooMany`] above [`MOST`]; [`HostsError::Failed`] when a step of
    /// the setup fails, as it does where the kernel has no bridge.
    pub fn new(count: usize) -> Result<Self, HostsError> {
        if count > MOST {
            return Err(HostsError::TooMany { count });
        }
        let programs = Programs::find(std::env::var_os("PATH").as_deref())?;
        let world = World::new(&programs)?;
        let mut made = Self {
            programs,
            hosts: Vec::with_capacity(count),
            world,
        };
        for _ in 0..count {
            let host = made.world.host(&made.programs)?;
            made.hosts.push(host);
        }
        made.link()?;
        Ok(made)
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.hosts.len()
    }

    /// Where a host is reached by the others: an address of 10.77.0.0/16.
    pub fn address(&self, host: usize) -> Ipv4Addr {
        assert!(
            host < self.count(),
            "there are {} hosts, and none has number {host}",
            self.count()
        );
        let number = host as u16 + 1;
        let [high, low] = number.to_be_bytes();
        Ipv4Addr::new(10, 77, high, low)
    }

    /// Limits a host's link to so many bits a second in each direction, headers
    /// counted, in place of an earlier limit.
    ///
    /// A queue of 25 ms, but of no less than 64 KiB, stands before the link at
    /// either end; what finds it full is lost.
    ///
    /// # Errors
    ///
    /// [`HostsError::Failed`], as for a rate of 0.
    pub fn rate(&self, host: usize, bits_per_second: u64) -> Result<(), HostsError> {
        let bytes = |ms: u64, least: u64| (bits_per_second.saturating_mul(ms) / 8000).max(least);
        let burst = bytes(BURST_MS, LEAST_BURST);
        // What may pass at once has to fit into the queue as well.
        let queue = bytes(QUEUE_MS, LEAST_QUEUE).max(burst);
        self.shape(
            host,
            &format!("tbf rate {bits_per_second}bit burst {burst} limit {queue}"),
        )
    }

    /// Lifts the limit on a host's link.
    ///
    /// # Errors
    ///
    /// [`HostsError::Failed`].
    pub fn unlimited(&self, host: usize) -> Result<(), HostsError> {
        self.shape(host, "noqueue")
    }

    /// Pulls a host's cable: nothing passes, nothing is said about it to either
    /// side, and the host's own interface has lost its carrier. Connections stay as
    /// they are and go on after [`Hosts::restore`].
    ///
    /// # Errors
    ///
    /// [`HostsError::Failed`].
    pub fn cut(&self, host: usize) -> Result<(), HostsError> {
        self.port(host, "down")
    }

    /// As [`Hosts::cut`], with the carrier still there: a switch that forwards
    /// nothing. Not even the host's own kernel knows.
    ///
    /// # Errors
    ///
    /// [`HostsError::Failed`].
    pub fn silence(&self, host: usize) -> Result<(), HostsError> {
        self.port(host, "nomaster")
    }

    /// Undoes [`Hosts::cut`] and [`Hosts::silence`]. The limit is what it was.
    ///
    /// # Errors
    ///
    /// [`HostsError::Failed`].
    pub fn restore(&self, host: usize) -> Result<(), HostsError> {
        self.port(host, "master bridge up")
    }

    /// A command that runs a program in a host: its network is the host's, and it is
    /// root over that. All else is this process's: files, process numbers, and what
    /// its user may do to others.
    ///
    /// The child is the program itself, so its number and its end are what
    /// [`Child`](std::process::Child) says. It is killed with its host at the
    /// latest. One that leaves the user namespace for another is on its own.
    pub fn command(&self, host: usize, program: impl AsRef<OsStr>) -> Command {
        self.hosts[host].command(&self.programs, program.as_ref())
    }

    /// The bridge, and a link from it to each host.
    fn link(&self) -> Result<(), HostsError> {
        let mut lines = String::from(
            "link add name bridge type bridge stp_state 0 forward_delay 0 mcast_snooping 0\n\
             link set dev bridge up\n",
        );
        for (host, holder) in self.hosts.iter().enumerate() {
            let number = holder.number();
            lines += &format!(
                "link add name port{host} type veth peer name eth0 netns {number}\n\
                 link set dev port{host} master bridge up\n"
            );
        }
        let ip = &self.programs.ip;
        self.world.holder().batch(&self.programs, ip, &lines)?;
        for (host, holder) in self.hosts.iter().enumerate() {
            let address = self.address(host);
            let lines = format!(
                "link set dev lo up\n\
                 address add {address}/16 dev eth0\n\
                 link set dev eth0 up\n"
            );
            holder.batch(&self.programs, ip, &lines)?;
        }
        Ok(())
    }

    /// Puts a queue before both ends of a link.
    fn shape(&self, host: usize, queue: &str) -> Result<(), HostsError> {
        let tc = &self.programs.tc;
        // Packets that wait are dropped: one that is larger than a new, smaller burst would stay at the
        // head of the queue, and nothing would pass any more.
        let lines = |port: &str| {
            format!("qdisc replace dev {port} root pfifo\nqdisc replace dev {port} root {queue}\n")
        };
        self.hosts[host].batch(&self.programs, tc, &lines("eth0"))?;
        let back = lines(&format!("port{host}"));
        self.world.holder().batch(&self.programs, tc, &back)
    }

    /// Changes the bridge's end of a link.
    fn port(&self, host: usize, change: &str) -> Result<(), HostsError> {
        assert!(host < self.count(), "there is no host {host}");
        let line = format!("link set dev port{host} {change}\n");
        let ip = &self.programs.ip;
        self.world.holder().batch(&self.programs, ip, &line)
    }
}
