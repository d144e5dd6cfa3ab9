//! Connections of devices from their places in a PCI tree, in the classes of `nvidia-smi topo -m`.

use super::topo_matrix::Connection;

/// Where a device hangs: what is above it, nearest first, and the socket.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Place {
    /// Positions of the bridges above.
    pub(super) bridges: Vec<usize>,
    /// Position of the socket.
    pub(super) socket: Option<usize>,
}

impl Place {
    /// The class of the path to another device; `None` where a socket is unknown.
    pub(super) fn to(&self, other: &Self) -> Option<Connection> {
        let shared = self.bridges.iter().find(|bridge| other.bridges.contains(bridge));
        match shared {
            Some(bridge) if self.bridges.first() == Some(bridge) && other.bridges.first() == Some(bridge) => {
                Some(Connection::Pix)
            }
            Some(_) => Some(Connection::Pxb),
            None if self.socket? == other.socket? => Some(Connection::Phb),
            None => Some(Connection::Sys),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_shared_place_decides() {
        let place = |bridges: &[usize], socket| Place {
            bridges: bridges.to_vec(),
            socket: Some(socket),
        };
        let gpu = place(&[5, 2], 0);
        assert_eq!(gpu.to(&place(&[5, 2], 0)), Some(Connection::Pix));
        assert_eq!(gpu.to(&place(&[6, 2], 0)), Some(Connection::Pxb));
        assert_eq!(gpu.to(&place(&[7], 0)), Some(Connection::Phb));
        assert_eq!(gpu.to(&place(&[8], 1)), Some(Connection::Sys));
        assert_eq!(gpu.to(&Place::default()), None);
    }
}
