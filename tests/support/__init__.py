"""What tests on real servers share: servers, processes to kill, a proxy that cuts, a feed, and the judge."""
