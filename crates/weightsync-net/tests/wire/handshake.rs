//! The handshake as a whole: pieces of any size, strangers, old and new versions, wrong secrets.

use proptest::prelude::*;
use weightsync_core::Remedy;
use weightsync_link::access::Key;
use weightsync_link::hello::*;

use crate::samples;

/// Two ends that have what they sent each other in between.
struct Talk {
    client: ClientHandshake,
    server: ServerHandshake,
    to_server: Vec<u8>,
    to_client: Vec<u8>,
    at_client: Option<Result<Agreed, HelloError>>,
    at_server: Option<Result<Agreed, HelloError>>,
}

impl Talk {
    fn new((client, hello): (ClientHandshake, [u8; HELLO_BYTES]), server: ServerHandshake) -> Self {
        Self {
            client,
            server,
            to_server: hello.into(),
            to_client: Vec::new(),
            at_client: None,
            at_server: None,
        }
    }

    /// Takes turns, `piece` bytes at a time, until nothing more is said. `damage` is asked before
    /// each piece is taken, with how many were sent that way before.
    fn go_on(&mut self, piece: usize, mut damage: impl FnMut(bool, usize, &mut u8)) {
        let mut sent = [0, 0];
        loop {
            let silent = self.to_server.is_empty() && self.to_client.is_empty();
            if silent {
                return;
            }
            for is_server in [true, false] {
                let (inbox, outbox) = match is_server {
                    true => (&mut self.to_server, &mut self.to_client),
                    false => (&mut self.to_client, &mut self.to_server),
                };
                let mut bytes: Vec<u8> = inbox.drain(..piece.min(inbox.len())).collect();
                let count = &mut sent[usize::from(is_server)];
                for byte in &mut bytes {
                    damage(is_server, *count, byte);
                    *count += 1;
                }
                let over = match is_server {
                    true => &mut self.at_server,
                    false => &mut self.at_client,
                };
                if bytes.is_empty() || over.is_some() {
                    continue;
                }
                let input = &mut &bytes[..];
                let step = match is_server {
                    true => self.server.feed(input),
                    false => self.client.feed(input),
                };
                outbox.extend(step.send);
                *over = match step.next {
                    Next::Read(missing) => {
                        assert!(missing > 0 && input.is_empty());
                        None
                    }
                    Next::Done(agreed) => Some(Ok(agreed)),
                    Next::Close(error) => Some(Err(error)),
                };
            }
        }
    }
}

fn untouched(_: bool, _: usize, _: &mut u8) {}

#[test]
fn pieces_of_any_size_make_the_same_handshake() {
    for piece in 1..=HELLO_BYTES {
        let mut talk = Talk::new(samples::client(), samples::server());
        talk.go_on(piece, untouched);
        let agreed = Agreed {
            protocol: PROTOCOL,
            role: LinkRole::Control,
        };
        assert_eq!(talk.at_client, Some(Ok(agreed)), "{piece}");
        assert_eq!(talk.at_server, Some(Ok(agreed)), "{piece}");
    }
}

#[test]
fn handshake_leaves_later_bytes_alone() {
    let [hello, server_hello, client_proof, server_proof] = samples::handshake();
    let mut server = samples::server();
    let early = [&hello[..], &client_proof, b"frames"].concat();
    let mut input = &early[..];
    assert_eq!(server.feed(&mut input).send, server_hello);
    assert_eq!(server.feed(&mut input).send, server_proof);
    assert_eq!(input, b"frames");

    let (mut client, _) = samples::client();
    let answers = [&server_hello[..], &server_proof, b"frames"].concat();
    let mut input = &answers[..];
    assert_eq!(client.feed(&mut input).send, client_proof);
    assert!(matches!(client.feed(&mut input).next, Next::Done(_)));
    assert_eq!(input, b"frames");
    let over = client.feed(&mut input).next;
    assert_eq!(over, Next::Close(HelloError::Over));
    assert_eq!(input, b"frames");
}

#[test]
fn wrong_secret_gets_no_proof_and_an_error() {
    let other = Key::new(b"another secret!!");
    let client = ClientHandshake::new(other, LinkRole::Bulk, Protocols::OURS, [1; 32]);
    let mut talk = Talk::new(client, samples::server());
    talk.go_on(64, untouched);
    assert_eq!(talk.at_server, Some(Err(HelloError::WrongToken)));
    assert_eq!(talk.at_client, Some(Err(HelloError::TokenRefused)));

    // The answer that it gets has nothing in it that came of the key.
    let refusal = samples::refusals().pop().expect("the last one").1;
    assert_eq!(refusal[0], 1);
    assert!(refusal[1..].iter().all(|byte| *byte == 0));
}

#[test]
fn a_server_without_the_secret_is_found_out() {
    let [_, server_hello, _, mut server_proof] = samples::handshake();
    let (mut client, _) = samples::client();
    assert!(matches!(
        client.feed(&mut &server_hello[..]).next,
        Next::Read(33)
    ));
    server_proof[1..].fill(0);
    let step = client.feed(&mut &server_proof[..]);
    assert_eq!(step.next, Next::Close(HelloError::WrongServer));

    // Nor does it help to send a client its own proof back.
    let (mut client, _) = samples::client();
    let proof = client.feed(&mut &server_hello[..]).send;
    let reflected = [&[0][..], &proof].concat();
    let step = client.feed(&mut &reflected[..]);
    assert_eq!(step.next, Next::Close(HelloError::WrongServer));
}

#[test]
fn a_replayed_client_is_refused() {
    let [hello, _, client_proof, _] = samples::handshake();
    let mut server = ServerHandshake::new(samples::key(), Protocols::OURS, None, [0x77; 32]);
    assert!(matches!(server.feed(&mut &hello[..]).next, Next::Read(32)));
    let step = server.feed(&mut &client_proof[..]);
    assert_eq!(step.next, Next::Close(HelloError::WrongToken));
}

#[test]
fn every_flipped_bit_ends_the_handshake() {
    let [hello, server_hello, client_proof, server_proof] = samples::handshake();
    let lengths = [
        (true, hello.len() + client_proof.len()),
        (false, server_hello.len() + server_proof.len()),
    ];
    for (to_server, len) in lengths {
        for bit in 0..8 * len {
            let mut talk = Talk::new(samples::client(), samples::server());
            talk.go_on(64, |is_server, at, byte| {
                if is_server == to_server && at == bit / 8 {
                    *byte ^= 1 << (bit % 8);
                }
            });
            let client_in = matches!(talk.at_client, Some(Ok(_)));
            let server_in = matches!(talk.at_server, Some(Ok(_)));
            assert!(!client_in, "bit {bit}, to the server: {to_server}");
            // The server has the client's proof before its own is damaged.
            let after_proof = !to_server && bit / 8 >= server_hello.len();
            assert_eq!(server_in, after_proof, "bit {bit}");
        }
    }
}

#[test]
fn a_busy_server_says_so_and_is_tried_again() {
    let server = ServerHandshake::new(
        samples::key(),
        Protocols::OURS,
        Some(TurnsAway::Busy),
        [2; 32],
    );
    let mut talk = Talk::new(samples::client(), server);
    talk.go_on(64, untouched);
    assert_eq!(talk.at_client, Some(Err(HelloError::Busy)));
    assert_eq!(talk.at_server, Some(Err(HelloError::TurnedAway)));
    assert_eq!(HelloError::Busy.remedy(), Remedy::Retry);
}

#[test]
fn full_server_keeps_its_known_agents() {
    use LinkRole::*;
    for role in [Control, Bulk, Status, Scrub, Collector] {
        let client = ClientHandshake::new(samples::key(), role, Protocols::OURS, [1; 32]);
        let server = ServerHandshake::new(
            samples::key(),
            Protocols::OURS,
            Some(TurnsAway::Busy),
            [2; 32],
        );
        let mut talk = Talk::new(client, server);
        talk.go_on(64, untouched);
        let is_in = matches!(talk.at_client, Some(Ok(_)));
        assert_eq!(is_in, role != LinkRole::Control, "{role:?}");
    }
}

#[test]
fn one_version_apart_is_fine_and_two_are_not() {
    let speaks = |newest: u16| Protocols {
        oldest: newest.saturating_sub(1).max(1),
        newest,
    };
    assert_eq!(speaks(PROTOCOL), Protocols::OURS);
    for here in 1..=9 {
        for there in 1..=9 {
            let (ours, theirs) = (speaks(here), speaks(there));
            let expected = (here.abs_diff(there) <= 1).then_some(here.min(there));
            assert_eq!(ours.common(theirs), expected, "{here} and {there}");

            let client = ClientHandshake::new(samples::key(), LinkRole::Status, ours, [1; 32]);
            let server = ServerHandshake::new(samples::key(), theirs, None, [2; 32]);
            let mut talk = Talk::new(client, server);
            talk.go_on(64, untouched);
            match expected {
                Some(protocol) => {
                    let agreed = Agreed {
                        protocol,
                        role: LinkRole::Status,
                    };
                    assert_eq!(talk.at_client, Some(Ok(agreed)));
                    assert_eq!(talk.at_server, Some(Ok(agreed)));
                }
                None => {
                    let error = HelloError::NoCommonProtocol { ours, theirs };
                    let words = error.to_string();
                    assert_eq!(talk.at_client, Some(Err(error)));
                    let older = if here < there { "here" } else { "there" };
                    let advice = format!("install a newer weightsync {older}");
                    assert!(words.contains(&advice), "{words}");
                }
            }
        }
    }
}

#[test]
fn a_protocol_that_was_not_offered_is_refused() {
    let (mut client, _) = samples::client();
    let hello = ServerHello {
        verdict: HelloVerdict::GoOn { protocol: 2 },
        protocols: Protocols {
            oldest: 1,
            newest: 2,
        },
        nonce: [0; 32],
    };
    let step = client.feed(&mut &hello.encode()[..]);
    assert!(matches!(
        step.next,
        Next::Close(HelloError::Malformed { .. })
    ));
    assert!(step.send.is_empty(), "no proof goes there");
}

#[test]
fn stranger_is_recognised_by_its_first_bytes() {
    let refused = |first: &[u8]| {
        let mut server = samples::server();
        match server.feed(&mut &*first).next {
            Next::Close(error) => error.to_string(),
            next => panic!("{next:?}"),
        }
    };
    let words = refused(b"GET / HTTP/1.1\r\nHost: trainer\r\n\r\n");
    assert!(
        words.contains("not weightsync") && words.contains("\"GET / HTTP/1.1\\r\\n\""),
        "{words}"
    );
    let words = refused(b"\x16\x03\x01\x02\x00\x01\x00\x01");
    assert!(words.contains(r"\x16\x03\x01"), "{words}");
    // Fewer bytes may still become a hello, but one that hangs up there was none.
    let mut server = samples::server();
    assert_eq!(server.feed(&mut &b"SSH-2"[..]).next, Next::Read(59));
    assert!(matches!(server.hung_up(), HelloError::NotWeightsync { .. }));
    let mut server = samples::server();
    assert_eq!(server.feed(&mut &b"wsL"[..]).next, Next::Read(61));
    assert_eq!(server.hung_up(), HelloError::HungUp { got: 3 });
    let (client, _) = samples::client();
    assert_eq!(client.hung_up(), HelloError::HungUp { got: 0 });
    // A proof does not begin like a hello, and need not.
    let [_, server_hello, ..] = samples::handshake();
    let (mut client, _) = samples::client();
    let _ = client.feed(&mut &server_hello[..]);
    let _ = client.feed(&mut &b"\0SSH"[..]);
    assert_eq!(client.hung_up(), HelloError::HungUp { got: 4 });
}

#[test]
fn roles_and_protocols_that_cannot_be_are_refused() {
    let hello = |role, oldest, newest| {
        let protocols = Protocols { oldest, newest };
        let nonce = [3; 32];
        let hello = ClientHello {
            protocols,
            role,
            nonce,
        };
        samples::server().feed(&mut &hello.encode()[..])
    };
    for (role, oldest, newest) in [(0, 1, 1), (6, 1, 1), (1, 0, 1), (1, 0, 0), (1, 2, 1)] {
        let step = hello(role, oldest, newest);
        let is_malformed = matches!(step.next, Next::Close(HelloError::Malformed { .. }));
        assert!(is_malformed && step.send.is_empty(), "{step:?}");
    }
    // A role of a protocol to come is not what is wrong with it.
    let step = hello(9, 8, 9);
    assert!(matches!(
        step.next,
        Next::Close(HelloError::NoCommonProtocol { .. })
    ));
    assert_eq!(step.send.len(), HELLO_BYTES);
}

proptest! {
    #[test]
    fn the_choice_is_the_same_from_either_side(
        a in 1_u16..1000, b in 0_u16..10, c in 1_u16..1000, d in 0_u16..10,
    ) {
        let (one, other) = (
            Protocols { oldest: a, newest: a + b },
            Protocols { oldest: c, newest: c + d },
        );
        let chosen = one.common(other);
        prop_assert_eq!(chosen, other.common(one));
        let both = |p: &u16| {
            let within = |range: Protocols| (range.oldest..=range.newest).contains(p);
            within(one) && within(other)
        };
        prop_assert_eq!(chosen, (1..=1010).rev().find(both));
    }

    #[test]
    fn hellos_come_back(
        (oldest, more, role) in (1_u16..=60_000, 0_u16..5000, any::<u8>()),
        nonce: [u8; 32],
        verdict in 0_u8..3,
    ) {
        let protocols = Protocols { oldest, newest: oldest + more };
        let client = ClientHello { protocols, role, nonce };
        prop_assert_eq!(ClientHello::decode(&client.encode()), Ok(client));
        let verdict = match verdict {
            0 => HelloVerdict::GoOn { protocol: oldest },
            1 => HelloVerdict::NoCommonProtocol,
            _ => HelloVerdict::Busy,
        };
        let server = ServerHello { verdict, protocols, nonce };
        prop_assert_eq!(ServerHello::decode(&server.encode()), Ok(server));
    }

    #[test]
    fn any_bytes_leave_both_ends_standing(bytes: Vec<u8>) {
        let mut server = samples::server();
        let (mut client, _) = samples::client();
        prop_assert!(!matches!(server.feed(&mut &bytes[..]).next, Next::Done(_)));
        prop_assert!(!matches!(client.feed(&mut &bytes[..]).next, Next::Done(_)));
    }
}
