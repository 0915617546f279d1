//! Other ends that are not weightsync, or mean harm.

use std::os::fd::{AsFd, OwnedFd};

use proptest::prelude::*;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, connect, recv, send, sendmsg, socket_with,
};
use weightsync_core::{Dtype, Layout};
use weightsync_mem::wire::{ModelMask, ReaderMessage, SenderMessage};
use weightsync_mem::{CopyOptions, Delivery, Error, SegmentReader};

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
    let mut reader = SegmentReader::attach(&attach(&address, 0), within(20)).unwrap();
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
    let hello = ReaderMessage::Hello {
        secret: SECRET,
        worker: weightsync_core::WorkerId(0),
        seen: weightsync_core::Epoch(0),
        models: ModelMask::ALL,
        delivery: Delivery::Newest,
        device: String::new(),
        instance: 77,
    };
    send(&fd, &hello.encode(), SendFlags::NOSIGNAL).unwrap();
    let mut answer = [0; 1024];
    let (len, _) = recv(&fd, &mut answer[..], rustix::net::RecvFlags::empty()).unwrap();
    let SenderMessage::Denied { reason } = SenderMessage::decode(&answer[..len]).unwrap() else {
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
    let welcome = SenderMessage::Welcome {
        run: crate::RUN,
        count: 64,
        models: ModelMask::ALL,
        relayed: 0,
    };
    for nonsense in [
        b"nonsense".to_vec(),
        welcome.encode(),
        SenderMessage::Slot { model: 0, index: 0 }.encode(),
    ] {
        let options = attach(&address, 0);
        let joining =
            std::thread::spawn(move || SegmentReader::attach(&options, within(20)).map(drop));
        let peer = rustix::net::accept(&fd).unwrap();
        send(&peer, &nonsense, SendFlags::NOSIGNAL).unwrap();
        let error = joining.join().unwrap().unwrap_err();
        assert!(matches!(error, Error::Protocol { .. }), "{error}");
        assert!(error.is_peer_fault());
    }
}

/// A memory file as a sender makes them.
fn sealed(bytes: &[u8], len: usize) -> OwnedFd {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
    let file = memfd_create("weightsync-hostile", MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&file, len as u64).unwrap();
    rustix::io::pwrite(&file, bytes, 0).unwrap();
    fcntl_add_seals(
        &file,
        SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE,
    )
    .unwrap();
    file
}

fn send_fds(peer: &OwnedFd, packet: &[u8], fds: &[&OwnedFd]) {
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
    assert!(ancillary.push(SendAncillaryMessage::ScmRights(&fds)));
    let part = [std::io::IoSlice::new(packet)];
    sendmsg(peer, &part, &mut ancillary, SendFlags::NOSIGNAL).unwrap();
}

#[test]
fn a_sender_that_hands_out_a_wrong_model_is_an_error() {
    const PAGE: usize = 1 << 20;
    let address = address();
    let name = SocketAddrUnix::new_abstract_name(address.as_bytes()).unwrap();
    let flags = SocketFlags::CLOEXEC;
    let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    rustix::net::bind(&listener, &name).unwrap();
    rustix::net::listen(&listener, 8).unwrap();
    let described = |bytes| {
        let layout = Layout::new([("w".to_owned(), Dtype::U8, vec![bytes])]);
        let layout = layout.unwrap().encode();
        (layout.len() as u64, sealed(&layout, PAGE))
    };
    let page = sealed(b"", PAGE);
    let (len, description) = described(100);
    // Such an image fits no machine: nothing is allocated from that claim.
    let (huge_len, huge) = described(1 << 49);
    let slot = sealed(b"", 4096);
    let doorbell = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
    let model = |index, slots, slot_bytes, layout_bytes, note_bytes| {
        let packet = SenderMessage::Model {
            index,
            slots,
            slot_bytes,
            layout_bytes,
            note_bytes,
        };
        packet.encode()
    };
    let denied = SenderMessage::Denied {
        reason: "changed my mind".into(),
    };
    for (packet, whole) in [
        (model(0, 1, 4096, len, 0), true),
        (model(0, 1, 4096, huge_len, 0), false),
        (model(1, 1, 4096, len, 0), false),
        (model(0, 2, 4096, len, 0), false),
        (model(0, 1, 8192, len, 0), false),
        (model(0, 1, 4096, u64::MAX, 0), false),
        (model(0, 1, 4096, len - 1, 0), false),
        (model(0, 1, 4096, len, 17 << 20), false),
        (model(0, 1, 4096, len, PAGE as u64), false),
        (denied.encode(), false),
        (SenderMessage::Slot { model: 0, index: 0 }.encode(), false),
    ] {
        let options = attach(&address, 0);
        let joining =
            std::thread::spawn(move || SegmentReader::attach(&options, within(20)).map(drop));
        let peer = rustix::net::accept(&listener).unwrap();
        let welcome = SenderMessage::Welcome {
            run: crate::RUN,
            count: 1,
            models: ModelMask::first(1),
            relayed: 0,
        };
        send_fds(&peer, &welcome.encode(), &[&page, &page, &doorbell]);
        let described = match packet == model(0, 1, 4096, huge_len, 0) {
            true => &huge,
            false => &description,
        };
        send_fds(&peer, &packet, &[described, &page, &slot]);
        let joined = joining.join().unwrap();
        assert_eq!(joined.is_ok(), whole, "{joined:?}");
        if let Err(error) = joined {
            let expected = matches!(error, Error::Denied { .. }) || error.is_peer_fault();
            assert!(expected, "{error}");
        }
    }
}

proptest! {
    #[test]
    fn every_decoder_survives_random_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..200), kind in any::<u8>()) {
        let _ = ReaderMessage::decode(&bytes);
        let _ = SenderMessage::decode(&bytes);
        let mut packet = SenderMessage::Slot { model: 0, index: 0 }.encode();
        packet.truncate(7);
        packet[6] = kind;
        packet.extend_from_slice(&bytes);
        if let Ok(message) = ReaderMessage::decode(&packet) {
            prop_assert_eq!(ReaderMessage::decode(&message.encode()).unwrap(), message);
        }
        if let Ok(message) = SenderMessage::decode(&packet) {
            prop_assert_eq!(SenderMessage::decode(&message.encode()).unwrap(), message);
        }
    }
}
