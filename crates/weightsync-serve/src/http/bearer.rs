//! The bearer token that admits a request, and the proof that shows who answers it.

use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use hyper::header::{AUTHORIZATION, HeaderMap, HeaderValue};

/// Separates the bearer of workers' requests from other uses of the secret.
const TO_SENDER: &str = "weightsync-serve 2026-11 bearer of requests to a sender";

/// Separates the bearer of a sender's requests.
const TO_WORKER: &str = "weightsync-serve 2026-11 bearer of requests to a worker";

/// Separates the bearer of requests to a synchronizer.
const TO_SYNCHRONIZER: &str = "weightsync-serve 2026-11 bearer of requests to a synchronizer";

/// Separates a sender's proof.
const OF_SENDER: &str = "weightsync-serve 2026-11 proof of a sender";

/// The value of `Authorization: Bearer`, made of an endpoint's secret. The two directions have
/// different values: a program that gets a worker's bearer cannot call workers with it.
#[derive(Clone)]
pub(crate) struct Bearer {
    /// Without one, every request is admitted.
    token: Option<[u8; 32]>,
    header: HeaderValue,
    /// Whether a browser may send it as a password, which it asks its user for.
    as_password: bool,
}

impl Bearer {
    /// For requests of workers to a sender.
    pub(crate) fn to_sender(secret: &[u8; 16]) -> Self {
        Self::new(TO_SENDER, secret)
    }

    /// For requests of a sender to its workers.
    pub(crate) fn to_worker(secret: &[u8; 16]) -> Self {
        Self::new(TO_WORKER, secret)
    }

    /// For requests to a synchronizer. Without a secret the synchronizer is on loopback, and open to the
    /// users of its machine.
    pub(crate) fn to_synchronizer(secret: Option<&[u8; 16]>) -> Self {
        match secret {
            Some(secret) => Self {
                as_password: true,
                ..Self::new(TO_SYNCHRONIZER, secret)
            },
            None => Self {
                token: None,
                header: HeaderValue::from_static("Bearer none"),
                as_password: false,
            },
        }
    }

    fn new(context: &str, secret: &[u8; 16]) -> Self {
        // A key of its own for each direction and use: one bearer tells nothing about another, nor
        // about the secret.
        let token = blake3::derive_key(context, secret);
        let text = format!("Bearer {}", blake3::Hash::from(token).to_hex());
        let mut header = HeaderValue::from_str(&text)
            .unwrap_or_else(|_| unreachable!("hexadecimal digits are a header's value"));
        // Keeps the value out of debug output.
        header.set_sensitive(true);
        Self {
            token: Some(token),
            header,
            as_password: false,
        }
    }

    /// The value of the header.
    pub(crate) fn header(&self) -> HeaderValue {
        self.header.clone()
    }

    /// Whether a request has the bearer. The time does not reveal how much of it is right.
    pub(crate) fn is_in(&self, headers: &HeaderMap) -> bool {
        let Some(token) = self.token else {
            // On loopback without a secret every local user may ask.
            return true;
        };
        let mut values = headers.get_all(AUTHORIZATION).iter();
        // Exactly one header: with two it would be open which of them counts.
        let (Some(value), None) = (values.next(), values.next()) else {
            return false;
        };
        let digits = value.to_str().ok().and_then(|text| self.digits(text));
        let hash = digits.and_then(|digits| blake3::Hash::from_hex(digits).ok());
        // blake3's comparison takes the same time wherever the two differ.
        hash.is_some_and(|hash| hash == blake3::Hash::from(token))
    }
}

impl Bearer {
    /// The digits in a header's text.
    fn digits(&self, text: &str) -> Option<String> {
        let (scheme, given) = text.split_once(' ')?;
        // The scheme's name has no case in HTTP.
        if scheme.eq_ignore_ascii_case("bearer") {
            return Some(given.to_owned());
        }
        if !self.as_password || !scheme.eq_ignore_ascii_case("basic") {
            return None;
        }
        // A browser sends `user:password` in base64. The token is the password.
        let pair = String::from_utf8(STANDARD.decode(given).ok()?).ok()?;
        // Any user name.
        Some(pair.split_once(':')?.1.to_owned())
    }

    /// How a request without it may authenticate: the value of `WWW-Authenticate`.
    pub(crate) fn challenge(&self) -> HeaderValue {
        HeaderValue::from_static(match self.as_password {
            true => "Basic realm=\"weightsync\"",
            false => "Bearer",
        })
    }
}

impl fmt::Debug for Bearer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Bearer(..)")
    }
}

/// The key with which a sender proves to a worker that it has an endpoint's secret. The bearer
/// is no proof: any program that listens at the sender's address gets it.
#[derive(Clone)]
pub(crate) struct ProofKey([u8; 32]);

impl ProofKey {
    pub(crate) fn new(secret: &[u8; 16]) -> Self {
        Self(blake3::derive_key(OF_SENDER, secret))
    }

    /// The proof for a worker's nonce and its connection's name. `==` of proofs takes the same
    /// time wherever they differ.
    pub(crate) fn proof(&self, nonce: &[u8; 32], id: &str) -> blake3::Hash {
        // The nonce has a fixed length, so the two parts cannot be split in another way.
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        hasher.update(nonce).update(id.as_bytes()).finalize()
    }
}

impl fmt::Debug for ProofKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ProofKey(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bearer_admits_only_the_right_value() {
        let right = Bearer::to_sender(&[7; 16]);
        let headers = |values: &[&str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(AUTHORIZATION, HeaderValue::from_str(value).unwrap());
            }
            headers
        };
        let value = right.header();
        let value = value.to_str().unwrap();
        assert!(right.is_in(&headers(&[value])));
        assert!(right.is_in(&headers(&[&value.replace("Bearer", "bearer")])));
        let digits = value.trim_start_matches("Bearer ");
        let (first, rest) = digits.split_at(1);
        let other = if first == "0" { "1" } else { "0" };
        for wrong in [
            &[][..],
            &[""],
            &["Bearer"],
            &["Bearer "],
            &[digits],
            &[&format!("Basic {digits}")],
            &[&format!("Bearer {other}{rest}")],
            &[&format!("Bearer {digits}0")],
            &[&format!("Bearer {}", &digits[1..])],
            &[value, value],
        ] {
            assert!(!right.is_in(&headers(wrong)), "{wrong:?}");
        }
        let others = [Bearer::to_worker(&[7; 16]), Bearer::to_sender(&[8; 16])];
        for other in others {
            assert!(!right.is_in(&headers(&[other.header().to_str().unwrap()])));
        }
        assert_eq!(format!("{right:?}"), "Bearer(..)");
        // A browser sends a password, which only a synchronizer takes.
        let basic = |digits: &str| format!("Basic {}", STANDARD.encode(format!("me:{digits}")));
        assert!(!right.is_in(&headers(&[&basic(digits)])));
        let of_synchronizer = Bearer::to_synchronizer(Some(&[7; 16]));
        let value = of_synchronizer.header();
        let digits = value.to_str().unwrap().trim_start_matches("Bearer ");
        assert!(of_synchronizer.is_in(&headers(&[&basic(digits)])));
        assert!(of_synchronizer.is_in(&headers(&[value.to_str().unwrap()])));
        for wrong in [&basic("0"), "Basic ", "Basic !", "Basic bWU="] {
            assert!(!of_synchronizer.is_in(&headers(&[wrong])), "{wrong}");
        }
        assert!(Bearer::to_synchronizer(None).is_in(&headers(&[])));
    }
}
