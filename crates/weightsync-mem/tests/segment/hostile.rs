//! Other ends that are not weightsync, or mean harm.

use std::os::fd::OwnedFd;

use proptest::prelude::*;
use rustix::net::{
    AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv, send,
    socket_with,
};
use weightsync_mem::wire::{FromReader, FromSender, Models};
use weightsync_mem::{CopyOptions, Delivery, Error, Reader};

use crate::{SECRET, address, attach, publish, slots, take, within, writer};

fn stranger(address: &str) -> OwnedFd {
    let fd = socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .unwrap();
    connect(
        &fd,
        &SocketAddrUnix::new_abstract_name(address.as_bytes()).unwrap(),
    )
    .unwrap();
    fd
}

#[test]
fn silent_and_talkative_strangers_keep_nobody_out() {
    let address = address();
    let mut writer = writer(&address, slots(2, 2));
    let silent: Vec<_> = (0..300).map(|_| stranger(&address)).collect();
    for junk in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        &[0; 1000],
        b"wsMM",
        b"wsMM\x02\x00\x01short",
    ] {
        let fd = stranger(&address);
        send(&fd, junk, SendFlags::NOSIGNAL).unwrap();
    }
    let mut reader = Reader::attach(&attach(&address, 0), within(20)).unwrap();
    publish(&mut writer, 1, CopyOptions::default());
    take(&mut reader);
    assert_eq!(writer.readers().len(), 1);
    drop(silent);
}

#[test]
fn a_hello_without_a_control_page_is_refused() {
    let address = address();
    let writer = writer(&address, slots(2, 2));
    let fd = stranger(&address);
    let hello = FromReader::Hello {
        secret: SECRET,
        worker: weightsync_core::WorkerId(0),
        seen: weightsync_core::Epoch(0),
        models: Models::ALL,
        delivery: Delivery::Newest,
        device: String::new(),
    };
    send(&fd, &hello.encode(), SendFlags::NOSIGNAL).unwrap();
    let mut answer = [0; 1024];
    let (len, _) = recv(&fd, &mut answer[..], rustix::net::RecvFlags::empty()).unwrap();
    let FromSender::Denied { reason } = FromSender::decode(&answer[..len]).unwrap() else {
        panic!("let in")
    };
    assert!(reason.contains("control page"), "{reason}");
    assert!(writer.readers().is_empty());
}

#[test]
fn a_sender_that_talks_nonsense_is_an_error() {
    let address = address();
    let name = SocketAddrUnix::new_abstract_name(address.as_bytes()).unwrap();
    let fd = socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .unwrap();
    rustix::net::bind(&fd, &name).unwrap();
    rustix::net::listen(&fd, 8).unwrap();
    let welcome = FromSender::Welcome {
        run: crate::RUN,
        count: 64,
        models: Models::ALL,
    };
    for nonsense in [
        b"nonsense".to_vec(),
        welcome.encode(),
        FromSender::Slot { model: 0, index: 0 }.encode(),
    ] {
        let options = attach(&address, 0);
        let joining = std::thread::spawn(move || Reader::attach(&options, within(20)).map(drop));
        let peer = rustix::net::accept(&fd).unwrap();
        send(&peer, &nonsense, SendFlags::NOSIGNAL).unwrap();
        let error = joining.join().unwrap().unwrap_err();
        assert!(matches!(error, Error::Protocol { .. }), "{error}");
        assert!(error.is_peer_fault());
    }
}

proptest! {
    #[test]
    fn every_decoder_survives_random_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..200), kind in any::<u8>()) {
        let _ = FromReader::decode(&bytes);
        let _ = FromSender::decode(&bytes);
        let mut packet = FromSender::Slot { model: 0, index: 0 }.encode();
        packet.truncate(7);
        packet[6] = kind;
        packet.extend_from_slice(&bytes);
        if let Ok(message) = FromReader::decode(&packet) {
            prop_assert_eq!(FromReader::decode(&message.encode()).unwrap(), message);
        }
        if let Ok(message) = FromSender::decode(&packet) {
            prop_assert_eq!(FromSender::decode(&message.encode()).unwrap(), message);
        }
    }
}
