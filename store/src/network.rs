//! Ranges of addresses, as operators write them.

use serde::Deserialize;
use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

/// A range of addresses: `10.96.0.0/12`, `fd00::/8`, or one address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Network {
    base: IpAddr,
    bits: u8,
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{0:?} is no network: write an address and its length such as 10.96.0.0/12, or one address")]
pub struct BadNetwork(String);

impl Network {
    pub fn contains(&self, address: IpAddr) -> bool {
        match (self.base, address) {
            (IpAddr::V4(base), IpAddr::V4(address)) => {
                (base.to_bits() ^ address.to_bits()).checked_shr(32 - u32::from(self.bits)).unwrap_or(0) == 0
            }
            (IpAddr::V6(base), IpAddr::V6(address)) => {
                (base.to_bits() ^ address.to_bits()).checked_shr(128 - u32::from(self.bits)).unwrap_or(0) == 0
            }
            _ => false,
        }
    }
}

impl From<Network> for hdfs::Network {
    fn from(network: Network) -> Self {
        Self { base: network.base, bits: network.bits }
    }
}

impl From<IpAddr> for Network {
    fn from(base: IpAddr) -> Self {
        Self { base, bits: if base.is_ipv4() { 32 } else { 128 } }
    }
}

impl FromStr for Network {
    type Err = BadNetwork;
    fn from_str(text: &str) -> Result<Self, BadNetwork> {
        let wrong = || BadNetwork(text.to_owned());
        let (base, bits) = match text.split_once('/') {
            Some((base, bits)) => (base, Some(bits.parse().map_err(|_| wrong())?)),
            None => (text, None),
        };
        let whole = Self::from(base.parse::<IpAddr>().map_err(|_| wrong())?);
        let bits = bits.unwrap_or(whole.bits);
        if bits > whole.bits {
            return Err(wrong());
        }
        Ok(Self { bits, ..whole })
    }
}

impl TryFrom<String> for Network {
    type Error = BadNetwork;
    fn try_from(text: String) -> Result<Self, BadNetwork> {
        text.parse()
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.base, self.bits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_are_parsed_or_refused() {
        for (text, inside, outside) in [
            ("10.96.0.0/12", "10.111.0.1", "10.112.0.0"),
            ("10.0.0.1", "10.0.0.1", "10.0.0.2"),
            ("0.0.0.0/0", "1.2.3.4", "::1"),
            ("fd00::/8", "fdff::1", "fe00::1"),
            ("::1", "::1", "::2"),
            ("::/0", "ff::", "1.2.3.4"),
        ] {
            let network: Network = text.parse().unwrap();
            assert!(network.contains(inside.parse().unwrap()), "{text} has {inside}");
            assert!(!network.contains(outside.parse().unwrap()), "{text} has not {outside}");
            assert_eq!(network.to_string().parse(), Ok(network));
        }
        for text in ["", "10.0.0.0/33", "10.0.0/8", "fd00::/129", "a/8", "10.0.0.0/", "10.0.0.0/-1"] {
            assert!(text.parse::<Network>().unwrap_err().to_string().contains("10.96.0.0/12"), "{text}");
        }
    }
}
